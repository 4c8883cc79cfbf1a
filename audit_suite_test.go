package edgelimit

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig"
)

var updateAudit = flag.Bool("update-audit", false, "write what the audit finds into the lists of testdata/audit; reasons are kept, and new ones must be given")

// Configurations that other people wrote for other purposes show whether the
// audit cries wolf. The lists say of each finding in them why it stands.

// TestAuditOfCaddysSuite audits the Caddyfiles of Caddy's own test suite, and
// the JSON that they stand for.
func TestAuditOfCaddysSuite(t *testing.T) {
	dir := filepath.Join(caddyDir(t), "caddytest", "integration")
	cases, _ := filepath.Glob(filepath.Join(dir, "caddyfile_adapt", "*"))
	if len(cases) < 200 {
		t.Fatalf("%d cases in %s", len(cases), dir)
	}
	var found []string
	for _, path := range cases {
		text, adapted, _ := strings.Cut(strings.ReplaceAll(string(readFile(t, path)), "\r\n", "\n"), "\n----------\n")
		findings, err := auditFile(filepath.Join(dir, "Caddyfile"), []byte(text), "caddyfile")
		if err != nil {
			if json.Valid([]byte(adapted)) {
				t.Errorf("%s: %v", filepath.Base(path), err)
			}
			continue // Caddy refuses it too
		}
		for _, f := range findings {
			at := filepath.Base(path)
			if file := filepath.Base(f.File); file != "Caddyfile" {
				at += " imports " + file
			}
			found = append(found, fmt.Sprintf("%s %s\t%s:%d", f.Severity, f.ID, at, f.Line))
		}
		if !json.Valid([]byte(adapted)) {
			continue
		}
		inJSON, err := auditFile("adapted.json", []byte(adapted), "json")
		if err != nil {
			t.Errorf("%s: in JSON: %v", filepath.Base(path), err)
		}
		if text, json := rulesOf(findings), rulesOf(inJSON); !slices.Equal(text, json) {
			t.Errorf("%s: in the Caddyfile %v, in JSON %v", filepath.Base(path), text, json)
		}
	}
	compareFindings(t, "testdata/audit/caddy-suite.txt", found, true)
}

// TestAuditOfTheDocs audits the Caddyfiles of the documentation, which people
// copy. Its places are named by their headings, since lines move.
func TestAuditOfTheDocs(t *testing.T) {
	documents, _ := filepath.Glob("docs/*.md")
	documents = append(documents, "README.md")
	var found []string
	blocks := 0
	for _, document := range documents {
		content, err := os.ReadFile(document)
		if err != nil {
			continue
		}
		for _, b := range caddyfilesIn(string(content)) {
			blocks++
			findings, err := auditFile("Caddyfile", []byte(b.text), "caddyfile")
			if err != nil {
				t.Errorf("%s, %s: %v", document, b.heading, err)
			}
			for _, f := range findings {
				found = append(found, fmt.Sprintf("%s %s\t%s, %s", f.Severity, f.ID, document, b.heading))
			}
		}
	}
	if blocks < 10 {
		t.Errorf("%d Caddyfiles in %v", blocks, documents)
	}
	compareFindings(t, "testdata/audit/docs.txt", found, false)
}

type docBlock struct{ heading, text string }

func caddyfilesIn(markdown string) (blocks []docBlock) {
	heading, inside := "", false
	for line := range strings.Lines(markdown) {
		switch {
		case inside && strings.HasPrefix(line, "```"):
			inside = false
		case inside:
			blocks[len(blocks)-1].text += line
		case strings.HasPrefix(line, "```caddyfile"):
			inside = true
			blocks = append(blocks, docBlock{heading: heading})
		case strings.HasPrefix(line, "#"):
			heading = strings.TrimSpace(strings.Trim(line, "#\n"))
		}
	}
	return blocks
}

// compareFindings compares what was found with a list: groups of one rule and
// one reason, and their places in lines that begin with a tab. What is in the
// list and not found is an error only where the list is complete.
func compareFindings(t *testing.T, path string, found []string, complete bool) {
	t.Helper()
	slices.Sort(found)
	found = slices.Compact(found)
	content, _ := os.ReadFile(path)
	reasons := make(map[string]string) // of each finding
	var intro, group, reason string
	for line := range strings.Lines(string(content)) {
		line = strings.TrimRight(line, "\n")
		switch {
		case line == "":
		case strings.HasPrefix(line, "#"):
			intro += line + "\n"
		case strings.HasPrefix(line, "\t"):
			reasons[group+line] = reason
		default:
			group, reason, _ = strings.Cut(line, ":")
			reason = strings.TrimSpace(reason)
			if reason == "" && !*updateAudit {
				t.Errorf("%s: %s: say why it stands", path, group)
			}
		}
	}
	if *updateAudit {
		writeFindingList(t, path, intro, found, reasons)
		return
	}
	for _, f := range found {
		if reasons[f] == "" {
			t.Errorf("%s does not say why this stands: %s", path, f)
		}
	}
	for f := range reasons {
		if complete && !slices.Contains(found, f) {
			t.Errorf("%s has a finding that is not found: %s", path, f)
		}
	}
}

func writeFindingList(t *testing.T, path, intro string, found []string, reasons map[string]string) {
	t.Helper()
	groups := make(map[string][]string)
	for _, f := range found {
		rule, at, _ := strings.Cut(f, "\t")
		group := rule + ": " + reasons[f]
		groups[group] = append(groups[group], "\t"+at+"\n")
	}
	text := intro
	for _, group := range slices.Sorted(func(yield func(string) bool) {
		for group := range groups {
			if !yield(group) {
				return
			}
		}
	}) {
		text += "\n" + group + "\n" + strings.Join(groups[group], "")
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// caddyDir is where the source of Caddy is, in the module cache.
func caddyDir(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/caddyserver/caddy/v2").Output()
	dir := strings.TrimSpace(string(out))
	if err != nil || dir == "" {
		t.Fatalf("where is Caddy's source? %v", err)
	}
	return dir
}

// TestDirectiveOrder compares our copy of the order of Caddy's directives, which
// cannot be asked for, with its source.
func TestDirectiveOrder(t *testing.T) {
	source := readFile(t, filepath.Join(caddyDir(t), "caddyconfig", "httpcaddyfile", "directives.go"))
	list := regexp.MustCompile(`(?s)var defaultDirectiveOrder = \[\]string\{(.*?)\n\}`).FindSubmatch(source)
	if list == nil {
		t.Fatal("no list of directives in Caddy's source")
	}
	var theirs []string
	for _, match := range regexp.MustCompile(`(?m)^\t"(\w+)",`).FindAllSubmatch(list[1], -1) {
		if name := string(match[1]); modernNames[name] == "" {
			theirs = append(theirs, name)
		}
	}
	ours := slices.DeleteFunc(slices.Clone(directiveOrder), func(name string) bool {
		return strings.HasPrefix(name, "edge_limit") || name == "rate_limit"
	})
	if !slices.Equal(ours, theirs) {
		t.Errorf("ours\n%v\nCaddy's\n%v", ours, theirs)
	}
	// where our own directives run is what Caddy makes of this
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(":80 {\nredir /a /b\nedge_limit_probe\nedge_limit\nrequest_body {\nmax_size 1\n}\n}\n"), nil)
	if err != nil {
		t.Fatal(err)
	}
	last := 0
	for _, handler := range []string{`"request_body"`, `"edge_limit"`, `"edge_limit_probe"`, `"static_response"`} {
		at := bytes.Index(config, []byte(`"handler":`+handler))
		if at < last {
			t.Errorf("%s is out of order in %s", handler, config)
		}
		last = at
	}
}

// TestRequestPlaceholders compares our list of what Caddy knows of a request
// with its source.
func TestRequestPlaceholders(t *testing.T) {
	source := readFile(t, filepath.Join(caddyDir(t), "modules", "caddyhttp", "replacer.go"))
	var theirs []string
	for _, match := range regexp.MustCompile(`case "(http\.request\.[\w.]+)"`).FindAllSubmatch(source, -1) {
		theirs = append(theirs, string(match[1]))
	}
	ours := slices.Clone(requestPlaceholders)
	slices.Sort(ours)
	slices.Sort(theirs)
	if !slices.Equal(ours, slices.Compact(theirs)) {
		t.Errorf("ours\n%v\nCaddy's\n%v", ours, theirs)
	}
	for _, match := range regexp.MustCompile(`ReplPrefix\s+= "(http\.request\.[\w.]+)"`).FindAllSubmatch(source, -1) {
		if !slices.Contains(requestPlaceholderFamilies, string(match[1])) {
			t.Errorf("Caddy knows the family %s", match[1])
		}
	}
}
