package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// floodDenials is how many requests a flood has at least that are denied.
const floodDenials = 1_000_000

// A flood of a million denials writes at most five lines a second, and nothing
// that Caddy and edge_limit write, but for Caddy's own access log, tells a
// secret or who the clients are.
func TestFloodAndWhatIsWritten(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	wrk := tool(t, "wrk")
	const secret, apiKey = "s3cret-of-the-proof-0123456789", "api-key-of-somebody"
	app, addr := startUpstream(t), freeAddr(t)
	c := startCaddy(t, `edge_limit {
		client {
			trusted_proxies static 127.0.0.1 127.0.0.5
			proof Proxy-Authorization {env.EDGE_PROOF}
		}
	}`, site(addr, `
		edge_limit {
			limit clients 5/1d
			limit keys 5/1d {
				match /keys
				key client {header.X-Api-Key}
			}
			ceiling all 100000/1d
		}
		edge_limit_probe /probe
		reverse_proxy `+app.addr), "EDGE_PROOF="+secret)
	client := clientFrom(t, "127.0.0.5")
	// what may not be written anywhere, each said at least once
	clients := []string{"203.0.113.7", "203.0.113.8", "2001:db8:1:2::3"}
	for _, ip := range clients {
		for range 8 {
			get(t, client, "http://"+addr, "X-Forwarded-For: "+ip)
			get(t, clientFrom(t, "127.0.0.6"), "http://"+addr+"/keys", "Proxy-Authorization: "+secret, "X-Client-IP: "+ip, "X-Api-Key: "+apiKey)
		}
	}
	for _, line := range []string{"X-Forwarded-For: unknown", "Proxy-Authorization: guessed-" + secret, "X-Real-IP: 203.0.113.7"} {
		get(t, client, "http://"+addr, line)
	}

	script := filepath.Join(t.TempDir(), "flood.lua")
	write(t, script, `
local n = 0
function request()
	n = n + 1
	local ip = string.format("203.0.%d.%d", math.floor(n / 250) % 20, n % 250)
	return wrk.format("GET", "/", {["X-Forwarded-For"] = ip, ["Host"] = "localhost"})
end`)
	denied := func() float64 {
		return c.metric(t, `caddy_edge_limit_requests_total{name="clients",outcome="denied"}`)
	}
	want := float64(floodDenials)
	if raceDetector || testing.Short() {
		want /= 10
	}
	linesBefore, seconds := c.output.linesWith("edge_limit"), 0
	for denied() < want {
		if seconds >= 300 {
			t.Fatalf("only %v denials in %d s", denied(), seconds)
		}
		output, err := exec.Command(wrk, "-t1", "-c16", "-d10s", "-s", script, "http://"+addr+"/").CombinedOutput()
		if err != nil {
			t.Fatalf("wrk: %v: %s", err, output)
		}
		seconds += 10
	}
	lines := c.output.linesWith("edge_limit") - linesBefore
	t.Logf("%v denials in %d s: %d lines", denied(), seconds, lines)
	if lines > 5*seconds {
		t.Errorf("%d lines in %d s", lines, seconds)
	}

	written := map[string]string{"the log": c.output.String(), "/metrics": c.metrics(t)}
	for _, path := range []string{"/edge_limit/limits", "/config/"} {
		response, err := http.Get("http://" + c.admin + path)
		if err != nil {
			t.Fatal(err)
		}
		written[path] = string(readAll(t, response))
	}
	for where, text := range written {
		if len(text) < 10 {
			t.Errorf("%s is empty", where)
		}
		for _, private := range append([]string{secret, apiKey, "203.0."}, clients...) {
			if strings.Contains(text, private) {
				t.Errorf("%s holds %q", where, private)
			}
		}
	}
	var answer struct{ Resolved string }
	a := get(t, clientFrom(t, "127.0.0.6"), "http://"+addr+"/probe", "Proxy-Authorization: "+secret, "X-Client-IP: 192.0.2.200")
	if err := json.Unmarshal(a.body, &answer); err != nil || answer.Resolved != "192.0.2.200" {
		t.Fatalf("the proof does not work: %d %s", a.status, a.body)
	}
	if strings.Contains(string(a.body)+fmt.Sprint(a.header), secret) {
		t.Error("the probe shows the secret")
	}
}
