package edgelimit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
)

const auditFolder = "testdata/audit/folder"

// TestAuditFolder wants each planted fault of the folder found, and none else. A
// Caddyfile says what it wants above the line: # want: <severity> <rule>, ... And
// with # want-file: what has no line. Beside JSON lies a list of severity, rule
// and path.
func TestAuditFolder(t *testing.T) {
	planted := make(map[string]bool)
	for _, path := range auditFiles(t) {
		t.Run(filepath.Base(path), func(t *testing.T) {
			content := readFile(t, path)
			findings, err := auditFile(path, content, "")
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, f := range findings {
				got = append(got, findingText(f))
				planted[f.ID] = true
				if f.Message == "" || f.Mend == "" {
					t.Errorf("%v says not what it means and what to do", f)
				}
			}
			want := plantedIn(t, path, string(content))
			slices.Sort(got)
			slices.Sort(want)
			if !slices.Equal(got, want) {
				t.Errorf("found\n\t%s\nplanted\n\t%s", strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
			}
			good := strings.HasPrefix(filepath.Base(path), "good_")
			if good != (count(findings, severityError)+count(findings, severityWarning) == 0) {
				t.Error("the file's name says the opposite of what is wanted of it")
			}
		})
	}
	for _, rule := range auditRuleNames(t) {
		if !planted[rule] {
			t.Errorf("no file has a fault for the rule %s", rule)
		}
	}
}

func findingText(f finding) string {
	at := f.Path
	if f.Line > 0 {
		at = fmt.Sprint(f.Line)
	}
	return strings.TrimSpace(string(f.Severity) + " " + f.ID + " " + at)
}

var (
	wantPattern     = regexp.MustCompile(`# want: (.*)$`)
	wantFilePattern = regexp.MustCompile(`# want-file: (.*)$`)
)

func plantedIn(t *testing.T, path, content string) (want []string) {
	if strings.HasSuffix(path, ".json") {
		for line := range strings.Lines(string(readFile(t, path+".want"))) {
			want = append(want, strings.TrimSpace(line))
		}
		return want
	}
	number := 0
	for line := range strings.Lines(content) {
		number++
		line = strings.TrimSpace(line)
		if match := wantPattern.FindStringSubmatch(line); match != nil {
			for _, one := range strings.Split(match[1], ", ") {
				want = append(want, fmt.Sprint(one, " ", number+1))
			}
		}
		if match := wantFilePattern.FindStringSubmatch(line); match != nil {
			want = append(want, match[1])
		}
	}
	return want
}

func auditFiles(t *testing.T) []string {
	t.Helper()
	caddyfiles, _ := filepath.Glob(auditFolder + "/*.Caddyfile")
	jsons, _ := filepath.Glob(auditFolder + "/*.json")
	files := append(caddyfiles, jsons...)
	if len(files) < 30 {
		t.Fatalf("%d files in %s", len(files), auditFolder)
	}
	return files
}

func readFile(t testing.TB, path string) []byte {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

// auditRuleNames reads the rules from the source.
func auditRuleNames(t *testing.T) (names []string) {
	t.Helper()
	for _, match := range regexp.MustCompile(`\n\trule\w+ += "([a-z-]+)"`).FindAllSubmatch(readFile(t, "audit.go"), -1) {
		names = append(names, string(match[1]))
	}
	if len(names) < 20 {
		t.Fatalf("%d rules in audit.go", len(names))
	}
	return names
}

// TestAuditDocs wants a heading in docs/audit.md for each rule, and no other.
func TestAuditDocs(t *testing.T) {
	var documented []string
	for _, match := range regexp.MustCompile("(?m)^### `([a-z-]+)`").FindAllSubmatch(readFile(t, "docs/audit.md"), -1) {
		documented = append(documented, string(match[1]))
	}
	rules := auditRuleNames(t)
	slices.Sort(rules)
	slices.Sort(documented)
	if !slices.Equal(rules, documented) {
		t.Errorf("documented\n%v\nrules\n%v", documented, rules)
	}
}

// TestAuditFolderFormatted wants Caddyfiles that people can copy.
func TestAuditFolderFormatted(t *testing.T) {
	for _, path := range auditFiles(t) {
		content := readFile(t, path)
		if strings.HasSuffix(path, ".Caddyfile") && !bytes.Equal(caddyfile.Format(content), content) {
			t.Errorf("%s: caddy fmt would write it otherwise:\n%s", path, caddyfile.Format(content))
		}
	}
}

// TestAuditSameInJSON audits what Caddy makes of each Caddyfile that this binary
// can adapt: the two readers must find the same.
func TestAuditSameInJSON(t *testing.T) {
	t.Setenv("EDGE_PROOF", "not-needed-to-adapt")
	adapted := 0
	for _, path := range auditFiles(t) {
		content := readFile(t, path)
		config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt(content, map[string]any{"filename": path})
		if err != nil || !strings.HasSuffix(path, ".Caddyfile") {
			continue // directives of other plugins, or planted to be refused
		}
		adapted++
		t.Run(filepath.Base(path), func(t *testing.T) {
			inText, err := auditFile(path, content, "caddyfile")
			if err != nil {
				t.Fatal(err)
			}
			inJSON, err := auditFile("adapted.json", config, "json")
			if err != nil {
				t.Fatal(err)
			}
			if text, json := rulesOf(inText), rulesOf(inJSON); !slices.Equal(text, json) {
				t.Errorf("in the Caddyfile\n\t%v\nin JSON\n\t%v\n%s", text, json, config)
			}
		})
	}
	if adapted < 25 {
		t.Errorf("only %d files could be adapted", adapted)
	}
}

// rulesOf lists what was found, without places: one line of a Caddyfile can
// become several of JSON.
func rulesOf(findings []finding) (rules []string) {
	for _, f := range findings {
		rules = append(rules, string(f.Severity)+" "+f.ID)
	}
	slices.Sort(rules)
	return slices.Compact(rules)
}

// TestAuditBroken wants a message that a person can act on, with file and line
// where they are known.
func TestAuditBroken(t *testing.T) {
	for _, test := range []struct {
		name, file, content, adapter, want string
	}{
		{"empty", "Caddyfile", "", "", "Caddyfile is empty"},
		{"only comments", "Caddyfile", "# nothing\n\n# here\n", "", "Caddyfile holds no site"},
		{"only a snippet", "Caddyfile", "(a) {\n\trespond ok\n}\n", "", "Caddyfile holds no site"},
		{"binary", "Caddyfile", "a.com {\n\trespond \x00\x01\n}\n", "", "Caddyfile:2: a byte that is no text (0x00)"},
		{"not UTF-8", "Caddyfile", "\xff\xfea\x00", "", "Caddyfile:1: a byte that is no text (0xff)"},
		{"brace missing", "Caddyfile", "a.com {\n\thandle {\n\t\trespond ok\n", "", "Caddyfile:3"},
		{"brace too many", "Caddyfile", "a.com {\n\trespond ok\n}\n}\n", "", "Caddyfile:4"},
		{"import missing", "Caddyfile", "a.com {\n\n\timport nowhere.conf\n}\n", "", "nowhere.conf, at Caddyfile:3"},
		{"heredoc", "Caddyfile", "a.com {\n\trespond <<END\n\t\tx\n", "", "line #"},
		{"options not first", "Caddyfile", "a.com {\n\trespond ok\n}\n\n{\n\tdebug\n}\n", "", "must come first, at Caddyfile:6"},
		{"nested without end", "Caddyfile", "a.com {\n" + strings.Repeat("handle {\n", 300) + strings.Repeat("}\n", 301), "", "Caddyfile:203: blocks are nested more than 200 deep"},
		{"JSON cut off", "caddy.json", "{\n\t\"apps\": {\n", "", "caddy.json:3: not valid JSON"},
		{"JSON with a comma", "caddy.json", "{\n\t\"apps\": {},\n}\n", "", "caddy.json:3: not valid JSON"},
		{"JSON with more", "caddy.json", "{}\n{}\n", "", "caddy.json:2: more text follows"},
		{"JSON array", "caddy.json", "[]", "", "caddy.json: a configuration is a JSON object"},
		{"JSON empty", "caddy.json", " \n", "", "caddy.json is empty"},
		{"Caddyfile as JSON", "caddy.json", "a.com {\n}\n", "", "caddy.json:1: not valid JSON"},
		{"unknown adapter", "Caddyfile", "a.com\n", "yaml", `no adapter "yaml" in this Caddy: there are json, caddyfile`},
		{"YAML", "caddy.yaml", "apps: {}\n", "", "caddy.yaml looks like yaml: name what reads it with --adapter"},
	} {
		t.Run(test.name, func(t *testing.T) {
			findings, err := auditFile(test.file, []byte(test.content), test.adapter)
			if err == nil {
				t.Fatalf("no error, and %d findings; want one with %q", len(findings), test.want)
			}
			if !strings.Contains(err.Error(), test.want) {
				t.Errorf("the error is\n%s\nwant in it\n%s", err, test.want)
			}
		})
	}
}

// TestAuditCommand runs the command as Caddy does.
func TestAuditCommand(t *testing.T) {
	in := func(name string) string { return filepath.Join(auditFolder, name) }
	missing := filepath.Join(t.TempDir(), "missing")
	for _, test := range []struct {
		name  string
		args  []string
		stdin string
		code  int
		want  string // in the output, or in the error of code 1
	}{
		{"clean", []string{"--config", in("good_nginx_in_front.Caddyfile"), "--strict"}, "", 0, "0 errors, 0 warnings, 0 notes"},
		{"notes", []string{"--config", in("good_bounded_keys.Caddyfile"), "--strict"}, "", 0, "0 errors, 0 warnings, 2 notes"},
		{"warnings", []string{"--config", in("bad_unused_names.Caddyfile")}, "", 0, "0 errors, 3 warnings"},
		{"warnings, strict", []string{"--config", in("bad_unused_names.Caddyfile"), "--strict"}, "", 20, "warning: limit forgotten is defined, and no route uses it"},
		{"errors", []string{"--config", in("bad_key_header.Caddyfile")}, "", 21, "bad_key_header.Caddyfile:5: error: limit by_api_key"},
		{"errors, strict", []string{"-c", in("bad_key_header.Caddyfile"), "--strict"}, "", 21, "[renewable-key]"},
		{"JSON", []string{"--config", in("bad_server.json")}, "", 21, "bad_server.json apps.http.servers.srv0.trusted_proxies: warning"},
		{"standard input", []string{"--config", "-"}, ":80 {\n\trespond ok\n}\n", 0, "stdin: 0 errors"},
		{"JSON from standard input", []string{"--config", "-"}, "{}", 0, "stdin: 0 errors"},
		{"an adapter", []string{"--config", in("bad_key_header.Caddyfile"), "--adapter", "caddyfile"}, "", 21, "Caddyfile:5"},
		{"missing", []string{"--config", missing}, "", 1, "reading the configuration: open " + missing},
		{"a directory", []string{"--config", t.TempDir()}, "", 1, "is a directory"},
		{"an argument without --config", []string{"Caddyfile"}, "", 1, "name the configuration with --config"},
		{"no Caddyfile here", nil, "", 1, "no Caddyfile here: name the configuration with --config"},
	} {
		t.Run(test.name, func(t *testing.T) {
			code, out, err := runAuditCommand(test.args, test.stdin)
			if err != nil {
				out = err.Error()
			}
			if code != test.code || !strings.Contains(out, test.want) {
				t.Errorf("code %d, want %d; said\n%s\nwant in it\n%s", code, test.code, out, test.want)
			}
		})
	}
}

// runAuditCommand runs the command with cobra, as Caddy's main function does,
// and returns the code that it will exit with. err is what is printed for code 1.
func runAuditCommand(args []string, stdin string) (code int, printed string, err error) {
	cmd := auditCommand()
	cmd.SilenceUsage = true // as Caddy's root command says
	cmd.SetArgs(args)
	cmd.SetIn(strings.NewReader(stdin))
	var out, errors bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(&errors)
	switch err = cmd.Execute(); {
	case err == nil:
		return 0, out.String(), nil
	case cmd.SilenceErrors:
		// a type of Caddy's own that is not exported
		code = int(reflect.ValueOf(err).Elem().FieldByName("ExitCode").Int())
		return code, out.String() + errors.String(), nil
	}
	return 1, out.String(), err
}

// TestAuditCommandJSON reads what --json prints.
func TestAuditCommandJSON(t *testing.T) {
	code, out, err := runAuditCommand([]string{"--config", auditFolder + "/bad_server.json", "--json"}, "")
	if code != exitAuditErrors || err != nil {
		t.Fatalf("code %d, error %v", code, err)
	}
	var report auditReport
	decoder := json.NewDecoder(strings.NewReader(out))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&report); err != nil {
		t.Fatal(err)
	}
	if report.Errors != 2 || report.Notes != 1 || len(report.Findings) != report.Errors+report.Warnings+report.Notes {
		t.Errorf("%+v", report)
	}
	for _, f := range report.Findings {
		if f.Path == "" || f.File == "" || f.Line != 0 {
			t.Errorf("%+v: want a file and a path", f)
		}
	}
}

// TestAuditTellsNoSecret audits secrets in all places where one can stand.
func TestAuditTellsNoSecret(t *testing.T) {
	const secret, pepper = "s3cr3t-of-the-proof", "p3pp3r-of-all-the-keys"
	t.Setenv("AUDIT_TEST_SECRET", secret)
	text := `{
	edge_limit {
		pepper ` + pepper + `
		client {
			proof X-Edge-Proof {$AUDIT_TEST_SECRET} ` + secret + `
		}
	}
}

example.com {
	edge_limit {
		client {
			proof X-Edge-Proof ` + secret + `
			client_header X-Edge-Proof
			hops 3
		}
		limit nothing 10/nothing
	}
	edge_limit {
		client {
			proof ` + secret + `? X-Edge-Proof
		}
	}
	log
	reverse_proxy app:3000 {
		header_up X-Real-IP ` + secret + `
		header_up X-Edge-Proof ` + secret + `
	}
}
`
	for _, adapter := range []string{"caddyfile", "json"} {
		content := []byte(text)
		if adapter == "json" {
			adaptable := strings.NewReplacer("10/nothing", "10/m", "\t\t\tclient_header X-Edge-Proof\n\t\t\thops 3\n", "", secret+"? ", "X-Other ").Replace(text)
			var err error
			if content, _, err = caddyconfig.GetAdapter("caddyfile").Adapt([]byte(adaptable), nil); err != nil {
				t.Fatal(err)
			}
		}
		findings, err := auditFile("config", content, adapter)
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := writeFindings(&out, "config", findings); err != nil {
			t.Fatal(err)
		}
		if err := writeFindingsJSON(&out, "config", findings); err != nil {
			t.Fatal(err)
		}
		if n := count(findings, severityWarning); n < 2 {
			t.Errorf("%s: %d warnings", adapter, n)
		}
		for _, text := range []string{secret, pepper} {
			if strings.Contains(out.String(), text) {
				t.Errorf("%s: the secret %s is told in\n%s", adapter, text, out.String())
			}
		}
	}
}

// TestAuditNamedRoutesWithoutEnd reads named routes that invoke each other.
func TestAuditNamedRoutesWithoutEnd(t *testing.T) {
	var text strings.Builder
	const routes, times = 30, 10
	for i := range routes {
		fmt.Fprintf(&text, "&(r%d) {\n", i)
		for range times {
			fmt.Fprintf(&text, "\tinvoke r%d\n", (i+1)%routes)
		}
		text.WriteString("}\n")
	}
	text.WriteString("example.com {\n\tinvoke r0\n}\n")
	if _, err := auditFile("Caddyfile", []byte(text.String()), ""); err != nil {
		t.Error(err)
	}
}

func TestWidest(t *testing.T) {
	eights := make([]string, 256)
	for i := range eights {
		eights[i] = fmt.Sprintf("%d.0.0.0/8", i)
	}
	for _, test := range []struct {
		ranges []string
		want   string // in the answer; "" wants none
	}{
		{nil, ""},
		{[]string{"not a range", "private_ranges"}, ""},
		{[]string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fd00::/8", "fc00::/7", "fe80::/10", "127.0.0.1"}, ""},
		{[]string{"::ffff:10.0.0.0/104"}, ""},
		{[]string{"2001:db8::/32", "2600::/16"}, ""},
		{[]string{"0.0.0.0/0"}, "0.0.0.0/0, every address"},
		{[]string{"10.0.0.0/8", "::/0"}, "::/0, every address"},
		{[]string{"::ffff:0.0.0.0/96"}, "every address"},
		{[]string{"0.0.0.0/1", "128.0.0.0/1"}, "a large part"},
		{[]string{"2000::/3"}, "a large part"},
		{[]string{"::/1"}, "a large part"},
		{[]string{"64.0.0.0/7"}, "a large part"},
		{eights, "every address of 0.0.0.0/0 in parts"},
		{eights[1:], ""},
	} {
		if got := widest(test.ranges); test.want == "" && got != "" || !strings.Contains(got, test.want) {
			t.Errorf("%v: %q, want %q", test.ranges, got, test.want)
		}
	}
}
