package edgelimit

import (
	"bytes"
	"path/filepath"
	"strings"
	"testing"
)

// FuzzAuditCaddyfile reads any bytes as a Caddyfile: an error or findings, whose
// places are in the file, and never a panic.
func FuzzAuditCaddyfile(f *testing.F) {
	addAuditSeeds(f, "*.Caddyfile")
	f.Add([]byte("a {\nb {$X} {\n{\n}\n}\n}"))
	f.Add([]byte("(a) {\n@x {\n}\n}\n&(b) {\ninvoke b\n}\nc {\nimport a\ninvoke b\nmatch {\n}\n}"))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, content []byte) {
		if bytes.Contains(content, []byte("import")) && bytes.ContainsAny(content, "/.") {
			return // it could read files of this machine
		}
		checkPlaces(t, filepath.Join(dir, "Caddyfile"), content, "caddyfile")
	})
}

// FuzzAuditJSON does the same with JSON.
func FuzzAuditJSON(f *testing.F) {
	addAuditSeeds(f, "*.json")
	f.Add([]byte(`{"apps":{"http":{"servers":{"a":{"routes":[{"match":[{"not":[{"not":1}]}],"handle":[{"handler":"invoke","name":"x"}]}],"named_routes":{"x":{}}}}}}}`))
	f.Fuzz(func(t *testing.T, content []byte) { checkPlaces(t, "caddy.json", content, "json") })
}

func addAuditSeeds(f *testing.F, pattern string) {
	paths, _ := filepath.Glob(filepath.Join(auditFolder, pattern))
	for _, path := range paths {
		f.Add(readFile(f, path))
	}
}

func checkPlaces(t *testing.T, name string, content []byte, adapter string) {
	findings, err := auditFile(name, content, adapter)
	if err != nil && len(err.Error()) < len("a: b") {
		t.Errorf("an error that says nothing: %v", err)
	}
	lines := bytes.Count(content, []byte("\n")) + 1
	for _, finding := range findings {
		switch {
		case finding.ID == ruleUnsetVariable:
		case adapter == "json" && (finding.Path == "" || finding.Line != 0),
			adapter == "caddyfile" && (finding.Line < 1 || finding.Line > lines || finding.Path != ""):
			t.Errorf("no place in %d lines: %+v", lines, finding)
		}
		if strings.TrimSpace(finding.Message) == "" || finding.Mend == "" {
			t.Errorf("says nothing: %+v", finding)
		}
	}
}
