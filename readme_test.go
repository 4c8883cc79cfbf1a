package edgelimit

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// TestReadmeNames: all that a user can write or read by name stands in the
// README. What is possible in a Caddyfile is taken from the comments above the
// parsers.
func TestReadmeNames(t *testing.T) {
	content, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	readme := string(content)

	subdirectives := make(map[string]bool)
	word := regexp.MustCompile(`^//\t\t+([a-z][a-z0-9_]*)`) // in the block: not the line that opens it
	paths, _ := filepath.Glob("caddyfile*.go")
	for _, path := range paths {
		source, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, comment := range strings.Split(string(source), "Syntax:")[1:] {
			for _, line := range strings.Split(comment, "\n")[1:] {
				if !strings.HasPrefix(line, "//") {
					break
				}
				if found := word.FindStringSubmatch(line); found != nil {
					subdirectives[found[1]] = true
				}
			}
		}
	}
	if len(subdirectives) < 30 {
		t.Fatalf("only %d subdirectives were found above the parsers", len(subdirectives))
	}
	for name := range subdirectives {
		if !regexp.MustCompile("(?m)^\\| .*`" + name + "[` ]").MatchString(readme) {
			t.Errorf("no table of the README has the subdirective %s", name)
		}
	}

	descs := make(chan *prometheus.Desc, 100)
	collector{}.Describe(descs)
	close(descs)
	metric := regexp.MustCompile(`fqName: "([^"]+)"`)
	for desc := range descs {
		if name := metric.FindStringSubmatch(desc.String())[1]; !strings.Contains(readme, "| `"+name+"`") {
			t.Errorf("no table of the README has the metric %s", name)
		}
	}

	source, err := os.ReadFile("module.go")
	if err != nil {
		t.Fatal(err)
	}
	placeholders := regexp.MustCompile(`\{http\.edge_limit\.[a-z_.]+\}`).FindAllString(string(source), -1)
	if len(placeholders) == 0 {
		t.Error("the comment of Handler names no placeholder")
	}
	for _, name := range placeholders {
		if !strings.Contains(readme, "| `"+name+"`") {
			t.Errorf("no table of the README has the placeholder %s", name)
		}
	}
}
