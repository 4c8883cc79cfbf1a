package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const monitoring = "../docs/monitoring/"

// A real Prometheus scrapes a real run: each query of the dashboard and each
// alert's expression must find data, or it watches nothing.
func TestPrometheus(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	prometheus := tool(t, "prometheus")
	app, addr, web := startUpstream(t), freeAddr(t), freeAddr(t)
	// small numbers, so that each state that an alert is about comes to be
	c := startCaddy(t, `edge_limit {
		max_keys 64
		client {
			trusted_proxies static 127.0.0.5
		}
	}`, site(addr, `
		edge_limit {
			limit clients 20/1d
			limit trial 10/1d {
				observe
			}
			ceiling all 100000/1d
			ceiling small 5/1d {
				match /small
			}
			in_flight busy 100
		}
		reverse_proxy `+app.addr))
	// an instance whose store is away
	away := startCaddy(t, "edge_limit {\nclient connection\npepper 0123456789abcdef\nstore redis {\naddress 127.0.0.1:1\n}\n}", site(freeAddr(t), "edge_limit {\nlimit shared 20/1d\n}"))
	dir := t.TempDir()
	config := filepath.Join(dir, "prometheus.yml")
	write(t, config, fmt.Sprintf("global:\n  scrape_interval: 1s\nscrape_configs:\n  - job_name: caddy\n    static_configs:\n      - targets: ['%s', '%s']\n", c.admin, away.admin))
	p := start(t, nil, prometheus, "--config.file="+config, "--storage.tsdb.path="+filepath.Join(dir, "data"),
		"--web.listen-address="+web, "--web.console.templates="+dir, "--web.console.libraries="+dir)
	p.await(t, func() bool { return listens(web) })

	client := clientFrom(t, "127.0.0.5")
	begin, n := time.Now(), 0
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
		for range 20 {
			n++
			get(t, client, "http://"+addr, fmt.Sprintf("X-Forwarded-For: 203.0.%d.%d", n/250%250, n%250))
			get(t, client, "http://"+addr, "X-Forwarded-For: 198.51.100.1")
		}
		get(t, client, "http://"+addr) // unresolved
		get(t, client, "http://"+addr, "X-Forwarded-For: unknown")
		get(t, client, "http://"+addr+"/small", "X-Forwarded-For: 198.51.100.2")
		get(t, clientFrom(t, "127.0.0.6"), "http://"+addr, "X-Forwarded-For: 198.51.100.3") // in doubt
		time.Sleep(100 * time.Millisecond)
	}

	check := func(what, expression string) {
		t.Helper()
		if values := query(t, web, expression); values == 0 {
			t.Errorf("%s finds nothing: %s", what, expression)
		}
	}
	for _, panel := range dashboardPanels(t) {
		for _, target := range panel.Targets {
			check("the panel "+panel.Title, dashboardQuery(target.Expr))
		}
	}
	plotPanels(t, web, begin)
	for name, expression := range alertExpressions(t) {
		if name == "EdgeLimitNothingDenied" {
			continue // compares days: alerts_test.yml has it
		}
		check("the alert "+name, expression)
	}
}

// query asks Prometheus and returns how many series it found.
func query(t *testing.T, web, expression string) int {
	t.Helper()
	response, err := http.Get("http://" + web + "/api/v1/query?query=" + url.QueryEscape(expression))
	if err != nil {
		t.Fatal(err)
	}
	var answer struct {
		Status string
		Error  string
		Data   struct{ Result []json.RawMessage }
	}
	if err := json.Unmarshal(readAll(t, response), &answer); err != nil {
		t.Fatal(err)
	}
	if answer.Status != "success" {
		t.Errorf("%s: %s", expression, answer.Error)
	}
	return len(answer.Data.Result)
}

type panel struct {
	Title   string
	Targets []struct{ Expr string }
}

func dashboardPanels(t *testing.T) []panel {
	t.Helper()
	text, err := os.ReadFile(monitoring + "dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct{ Panels []panel }
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}
	if len(dashboard.Panels) == 0 {
		t.Fatal("the dashboard has no panels")
	}
	return dashboard.Panels
}

// alertExpressions reads the expressions of the alert rules, which promtool
// checks as a whole.
func alertExpressions(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile(monitoring + "alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	expressions := make(map[string]string)
	name, inside := "", false
	for line := range strings.Lines(string(text)) {
		trimmed := strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(trimmed, "- alert: "):
			name, inside = strings.TrimPrefix(trimmed, "- alert: "), false
		case strings.HasPrefix(trimmed, "expr: "):
			expression := strings.TrimPrefix(trimmed, "expr: ")
			if inside = expression == "|"; !inside {
				expressions[name] = expression
			}
		case inside && strings.HasPrefix(line, "            "):
			expressions[name] += " " + trimmed
		default:
			inside = false
		}
	}
	if len(expressions) == 0 {
		t.Fatal("there are no alerts")
	}
	return expressions
}

// promtool's own checks of the rules and their tests, and of what Caddy exposes.
func TestPromtool(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	promtool := tool(t, "promtool")
	addr := freeAddr(t)
	c := startCaddy(t, "", site(addr, "edge_limit {\nlimit a 10/m\nceiling b 10/s\nin_flight c 5\n}\nrespond ok"))
	get(t, clientFrom(t, "127.0.0.5"), "http://"+addr)
	var ours strings.Builder
	for line := range strings.Lines(c.metrics(t)) {
		if strings.Contains(line, "caddy_edge_limit_") {
			ours.WriteString(line)
		}
	}
	for _, check := range []struct {
		args  []string
		input string
	}{
		{[]string{"check", "rules", monitoring + "alerts.yml"}, ""},
		{[]string{"test", "rules", monitoring + "alerts_test.yml"}, ""},
		{[]string{"check", "metrics"}, ours.String()},
	} {
		cmd := exec.Command(promtool, check.args...)
		cmd.Stdin = strings.NewReader(check.input)
		if output, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(check.args, " "), err, output)
		}
	}
}
