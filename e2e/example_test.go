package e2e

import (
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

const exampleFile = "../example.Caddyfile"

var (
	portPattern      = regexp.MustCompile(`:(\d{4,5})\b`)
	frontPattern     = regexp.MustCompile(`(?m)^(?:http://)?(?:localhost|127\.0\.0\.1)?:(\d+)\b.*\{$`)
	firstRatePattern = regexp.MustCompile(`(?m)^\s+limit \w+ (\d+)/`)
	addressPattern   = regexp.MustCompile(`\d+\.\d+\.\d+\.\d+`)
)

// example copies example.Caddyfile, with free ports in place of its own, which
// may be taken on this machine. The first site is the one to ask.
func example(t *testing.T) (file, frontAddr string, burst int) {
	t.Helper()
	original, err := os.ReadFile(exampleFile)
	if err != nil {
		t.Fatal(err)
	}
	ports := make(map[string]string)
	text := portPattern.ReplaceAllStringFunc(string(original), func(port string) string {
		if ports[port] == "" {
			ports[port] = ":" + portOf(freeAddr(t))
		}
		return ports[port]
	})
	front, rate := frontPattern.FindStringSubmatch(text), firstRatePattern.FindStringSubmatch(text)
	if front == nil || rate == nil {
		t.Fatalf("%s has no site with a port, or no limit", exampleFile)
	}
	burst, err = strconv.Atoi(rate[1])
	if err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(t.TempDir(), filepath.Base(exampleFile))
	write(t, file, text)
	return file, "127.0.0.1:" + front[1], burst
}

// What a newcomer does first: run the example and send it a forged header.
func TestExampleOverCurl(t *testing.T) {
	t.Parallel()
	file, addr, burst := example(t)
	p := start(t, append(homeEnv(t.TempDir()), "CADDY_ADMIN="+freeAddr(t)), caddyBinary, "run", "--config", file)
	p.await(t, func() bool { return listens(addr) })

	passed := 0
	for {
		// curl plays the proxy, which appends the client that it saw
		headers := append(forged(passed), "X-Forwarded-For: 203.0.113.7")
		a := curl(t, "127.0.0.1", "http://"+addr+"/", headers)
		if a.status != http.StatusOK {
			a.wantDenied(t, time.Hour)
			break
		}
		// whatever the application prints, it knows one address
		if told := addressPattern.FindAllString(string(a.body), -1); !slices.Equal(told, []string{"203.0.113.7"}) {
			t.Errorf("after %q the application was told %q: %s", headers, told, a.body)
		}
		if passed++; passed > burst+2 { // a slow machine may see one refilled
			break
		}
	}
	if passed < burst || passed > burst+2 {
		t.Errorf("%d requests passed, want %d", passed, burst)
	}
}

func TestExampleIsFormattedAndAdapts(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"fmt", "--diff", exampleFile},
		{"adapt", "--config", exampleFile, "--validate"},
		{"validate", "--config", exampleFile},
	} {
		cmd := exec.Command(caddyBinary, args...)
		cmd.Env = append(os.Environ(), homeEnv(t.TempDir())...)
		output, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("caddy %s: %v\n%s", strings.Join(args, " "), err, output)
		}
		for line := range strings.Lines(string(output)) {
			if args[0] == "adapt" && strings.Contains(line, `"level":"warn"`) {
				t.Errorf("caddy adapt warns: %s", line)
			}
		}
	}
}

func TestListModules(t *testing.T) {
	t.Parallel()
	output, err := exec.Command(caddyBinary, "list-modules").Output()
	if err != nil {
		t.Fatal(err)
	}
	modules := strings.Fields(string(output))
	for _, want := range []string{"edge_limit", "http.handlers.edge_limit", "http.handlers.edge_limit_probe", "admin.api.edge_limit"} {
		if !slices.Contains(modules, want) {
			t.Errorf("the module %s is not there", want)
		}
	}
}
