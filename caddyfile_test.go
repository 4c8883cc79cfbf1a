package edgelimit

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
)

var updateCaddyfiles = flag.Bool("update-caddyfiles", false,
	"write what the adapter makes of the Caddyfiles in testdata/caddyfile into the files that hold JSON")

func init() {
	caddy.RegisterModule(logObserver{})
}

// caddyfileCase is a file of testdata/caddyfile in the form that Caddy itself
// uses: a Caddyfile, a dashed line, and what comes of it. That is JSON, or the
// lines that the error must contain. A third part, in files named
// *_fails_to_load, holds what the error must contain when the JSON is loaded.
type caddyfileCase struct {
	path      string
	caddyfile string
	adapted   string
	loading   string
}

const (
	caseDivider      = "\n----------\n"
	caseFailsToLoad  = "_fails_to_load"
	caseFailsToAdapt = "_error"
)

func TestCaddyfiles(t *testing.T) {
	paths, err := filepath.Glob("testdata/caddyfile/*.caddyfiletest")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no cases in testdata/caddyfile (%v)", err)
	}
	for _, path := range paths {
		name := strings.TrimSuffix(filepath.Base(path), ".caddyfiletest")
		t.Run(name, func(t *testing.T) {
			c := readCaddyfileCase(t, path)
			requireFormatted(t, c.caddyfile)
			if strings.HasSuffix(name, caseFailsToAdapt) {
				requireAdaptError(t, c)
				return
			}
			config := requireAdapts(t, c)
			requireLoads(t, config, c.loading, strings.HasSuffix(name, caseFailsToLoad))
		})
	}
}

func readCaddyfileCase(t *testing.T, path string) caddyfileCase {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(string(content), caseDivider)
	if len(parts) < 2 || len(parts) > 3 {
		t.Fatalf("%d parts: want a Caddyfile, a dashed line, and what comes of it", len(parts))
	}
	c := caddyfileCase{path: path, caddyfile: parts[0] + "\n", adapted: strings.TrimSpace(parts[1])}
	if len(parts) == 3 {
		c.loading = strings.TrimSpace(parts[2])
	}
	return c
}

// requireFormatted refuses a Caddyfile that `caddy fmt` would change.
func requireFormatted(t *testing.T, text string) {
	t.Helper()
	if formatted := caddyfile.Format([]byte(text)); !bytes.Equal(formatted, []byte(text)) {
		t.Errorf("caddy fmt would write this as\n%s", formatted)
	}
}

// adaptCaddyfile makes indented JSON of a Caddyfile.
func adaptCaddyfile(t *testing.T, text string) ([]byte, error) {
	t.Helper()
	config, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), nil)
	if err != nil {
		return nil, err
	}
	for _, warning := range warnings {
		t.Errorf("warning: %s", warning)
	}
	var indented bytes.Buffer
	if err := json.Indent(&indented, config, "", "\t"); err != nil {
		t.Fatal(err)
	}
	return indented.Bytes(), nil
}

func requireAdapts(t *testing.T, c caddyfileCase) []byte {
	t.Helper()
	config, err := adaptCaddyfile(t, c.caddyfile)
	if err != nil {
		t.Fatalf("adapting: %v", err)
	}
	if *updateCaddyfiles {
		text := c.caddyfile + caseDivider[1:] + string(config) + "\n"
		if c.loading != "" {
			text += caseDivider[1:] + c.loading + "\n"
		}
		if err := os.WriteFile(c.path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return config
	}
	if string(config) != c.adapted {
		t.Errorf("adapted to\n%s\nwant\n%s", config, c.adapted)
	}
	return config
}

func requireAdaptError(t *testing.T, c caddyfileCase) {
	t.Helper()
	config, err := adaptCaddyfile(t, c.caddyfile)
	if err == nil {
		t.Fatalf("adapted to\n%s\nwant an error with\n%s", config, c.adapted)
	}
	requireErrorLines(t, err, c.adapted)
	if !strings.Contains(c.adapted, "Caddyfile:") {
		t.Error("the case does not say which line the error must name")
	}
}

// requireErrorLines wants each line of want in the error.
func requireErrorLines(t *testing.T, err error, want string) {
	t.Helper()
	if want == "" {
		t.Error("the case does not say what the error must contain")
	}
	for line := range strings.Lines(want) {
		line = strings.TrimSpace(line)
		// "at Caddyfile:3" is not in "at Caddyfile:30"
		pattern := regexp.MustCompile(regexp.QuoteMeta(line) + `(\D|$)`)
		if !pattern.MatchString(err.Error()) {
			t.Errorf("the error is\n%s\nwant in it\n%s", err, line)
		}
	}
}

// requireLoads provisions a configuration without starting it.
func requireLoads(t *testing.T, config []byte, loading string, fails bool) {
	t.Helper()
	err := validateJSON(t, config)
	switch {
	case fails && err == nil:
		t.Fatalf("the configuration loads, want an error with\n%s", loading)
	case fails:
		requireErrorLines(t, err, loading)
	case err != nil:
		t.Errorf("loading: %v", err)
	}
}

// validateJSON does what `caddy validate` does. It logs errors only, unless the
// configuration says otherwise.
func validateJSON(t *testing.T, config []byte) error {
	t.Helper()
	t.Setenv("XDG_DATA_HOME", t.TempDir()) // where the instance's id is kept
	parsed := &caddy.Config{Logging: &caddy.Logging{Logs: map[string]*caddy.CustomLog{
		"default": {BaseLog: caddy.BaseLog{Level: "ERROR"}},
	}}}
	if err := caddy.StrictUnmarshalJSON(config, parsed); err != nil {
		t.Fatalf("unmarshaling the configuration: %v", err)
	}
	return caddy.Validate(parsed)
}

// TestWarningsAtLoad checks what is said at load about a configuration that
// loads, and gives more away than it seems to.
func TestWarningsAtLoad(t *testing.T) {
	const everyone = "trusted_proxies contains every address"
	for _, test := range []struct {
		name    string
		options string // of the directive
		want    string // in the one warning; none if empty
		field   string // in its fields
	}{
		{"no trust", "", "", ""},
		{"a range", "client {\ntrusted_proxies static 10.0.0.0/8\n}", "", ""},
		{"an IPv4-mapped range", "client {\ntrusted_proxies static ::ffff:10.0.0.0/104\n}", "", ""},
		{"every IPv4 address", "client {\ntrusted_proxies static 0.0.0.0/0\n}", everyone, "0.0.0.0/0"},
		{"every IPv4 address behind a range", "client {\ntrusted_proxies static 10.0.0.0/8 0.0.0.0/0\n}", everyone, "0.0.0.0/0"},
		{"every IPv6 address", "client {\ntrusted_proxies static ::/0\n}", everyone, "::/0"},
		{"every IPv4 address, mapped", "client {\ntrusted_proxies static ::ffff:0.0.0.0/96\n}", everyone, "/96"},
		{"hops", "client {\ntrusted_proxies static 10.0.0.0/8\nhops 2\n}", "", ""},
		{"hops unverified", "client {\ntrusted_proxies static 10.0.0.0/8\nhops 2 unverified\n}", "hops are counted unverified", "2"},
		{"one hop unverified passes over nothing", "client {\ntrusted_proxies static 10.0.0.0/8\nhops 1 unverified\n}", "", ""},
		{"proof in a header that logs redact", "client {\nproof Proxy-Authorization {env.PATH}\n}", "", ""},
		{"proof in another header", "client {\nproof X-Proof-RUN {env.PATH}\n}", "error and access logs in clear", "request>headers>X-Proof-RUN delete"},
		{"a key of the peer's address", "limit peers 10/m {\nkey {remote_host}\n}", "", ""},
		{"a key of the peer's address behind proxies", "client {\ntrusted_proxies static 10.0.0.0/8\n}\nlimit peers 10/m {\nkey {remote_host}\n}", "write key client", "peers"},
	} {
		t.Run(test.name, func(t *testing.T) {
			// a warning is logged once for a site, or for a header: each run has its own
			run := strings.NewReplacer("RUN", strconv.FormatInt(warningRuns.Add(1), 10))
			config := adaptDirective(t, run.Replace("strip X-Run-RUN\n"+test.options))
			warnings, err := validateObserved(t, config)
			if err != nil {
				t.Fatal(err)
			}
			if test.want == "" {
				if len(warnings) > 0 {
					t.Errorf("warnings: %v, want none", warnings)
				}
				return
			}
			if len(warnings) != 1 || !strings.Contains(warnings[0], test.want) || !strings.Contains(warnings[0], run.Replace(test.field)) {
				t.Errorf("warnings: %q, want one with %q and %q", warnings, test.want, run.Replace(test.field))
			}
		})
	}
}

// TestWarningOncePerSite: a reload does not repeat what was said, and another
// site gets its own.
func TestWarningOncePerSite(t *testing.T) {
	site := func() []byte {
		run := strconv.FormatInt(warningRuns.Add(1), 10)
		return adaptDirective(t, "strip X-Run-"+run+"\nclient {\ntrusted_proxies static ::/0\n}")
	}
	one, other := site(), site()
	for i, test := range []struct {
		config []byte
		want   int
	}{{one, 1}, {one, 0}, {other, 1}} {
		warnings, err := validateObserved(t, test.config)
		if err != nil {
			t.Fatal(err)
		}
		if len(warnings) != test.want {
			t.Errorf("load %d: %d warnings %q, want %d", i, len(warnings), warnings, test.want)
		}
	}
}

var warningRuns atomic.Int64

// adaptDirective makes JSON of a site with one directive of these lines.
func adaptDirective(t *testing.T, lines string) []byte {
	t.Helper()
	text := caddyfile.Format([]byte(":8080 {\nedge_limit {\n" + lines + "\n}\n}\n"))
	config, err := adaptCaddyfile(t, string(text))
	if err != nil {
		t.Fatal(err)
	}
	return config
}

// validateObserved provisions a configuration and returns the warnings of this
// module: each with its message, and its fields as JSON.
func validateObserved(t *testing.T, config []byte) ([]string, error) {
	t.Helper()
	core, logs := observer.New(zapcore.WarnLevel)
	observedCores.Store(t.Name(), core)
	defer observedCores.Delete(t.Name())

	var with map[string]json.RawMessage
	if err := json.Unmarshal(config, &with); err != nil {
		t.Fatal(err)
	}
	with["logging"] = caddyconfig.JSON(map[string]any{"logs": map[string]any{"default": map[string]any{
		"core": map[string]string{"module": "edge_limit_observer", "test": t.Name()},
	}}}, nil)
	err := validateJSON(t, caddyconfig.JSON(with, nil))

	var warnings []string
	for _, entry := range logs.All() {
		if !slices.Contains(strings.Split(entry.LoggerName, "."), "edge_limit") {
			continue
		}
		fields, err := json.Marshal(entry.ContextMap())
		if err != nil {
			t.Fatal(err)
		}
		unescaped := strings.ReplaceAll(string(fields), `\u003e`, ">")
		warnings = append(warnings, entry.Message+" "+unescaped)
	}
	return warnings, err
}

// logObserver lets a test read what the loggers of a configuration are told.
type logObserver struct {
	zapcore.Core `json:"-"`

	// The test that asked for it.
	Test string `json:"test,omitempty"`
}

var observedCores sync.Map // zapcore.Core by the name of the test

// CaddyModule returns the Caddy module information.
func (logObserver) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "caddy.logging.cores.edge_limit_observer",
		New: func() caddy.Module { return new(logObserver) },
	}
}

// Provision finds the core of the test.
func (o *logObserver) Provision(caddy.Context) error {
	o.Core = zap.NewNop().Core()
	if core, ok := observedCores.Load(o.Test); ok {
		o.Core = core.(zapcore.Core)
	}
	return nil
}
