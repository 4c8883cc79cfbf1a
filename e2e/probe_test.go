package e2e

import (
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"
)

// proved is what `caddy edge-limit probe` ended with.
type proved struct {
	status int
	output string
}

// prove runs `caddy edge-limit probe`.
func prove(t *testing.T, args ...string) proved {
	t.Helper()
	cmd := exec.Command(caddyBinary, append([]string{"edge-limit", "probe"}, args...)...)
	output, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return proved{0, string(output)}
	case errors.As(err, &exit):
		return proved{exit.ExitCode(), string(output)}
	}
	t.Fatal(err)
	return proved{}
}

func (p proved) want(t *testing.T, status int, says ...string) {
	t.Helper()
	if p.status != status {
		t.Errorf("status %d, want %d", p.status, status)
	}
	for _, words := range says {
		if !strings.Contains(p.output, words) {
			t.Errorf("it does not say %q", words)
		}
	}
	if t.Failed() {
		t.Log(p.output)
	}
}

// proxied is a site behind proxies on loopback.
func proxied(client string) string {
	return fmt.Sprintf("edge_limit {\n%s\n}\nedge_limit_probe /client-ip\nrespond 404", client)
}

const (
	oneHop  = "client {\ntrusted_proxies static 127.0.0.1/32\nhops 1\n}"
	appends = "proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;"
)

func TestProveBehindNginx(t *testing.T) {
	for _, row := range []struct {
		name, globals, site, nginx string
		status                     int
		says                       []string
	}{
		{
			name: "right", site: proxied(oneHop), nginx: appends,
			status: 0, says: []string{"SPOOF-PROOF", "over HTTP/1.1", "over HTTP/2.0"},
		},
		{
			name: "without the line: the caller's header is passed on", site: proxied(oneHop),
			status: 10, says: []string{"SPOOFABLE: with X-Forwarded-For ", "UNRESOLVED", "proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;"},
		},
		{
			name: "without the line, and who is unresolved is denied", site: proxied(oneHop + "\nunresolved deny"),
			status: 10, says: []string{"SPOOFABLE: with X-Forwarded-For ", "status 403"},
		},
		{
			name: "the header is removed", site: proxied(oneHop), nginx: `proxy_set_header X-Forwarded-For "";`,
			status: 11, says: []string{"UNRESOLVED", "Mend: your proxy sends no X-Forwarded-For"},
		},
		{
			name: "one hop too many, unverified", nginx: appends,
			site:   proxied("client {\ntrusted_proxies static 127.0.0.1/32\nhops 2 unverified\n}"),
			status: 10, says: []string{"SPOOFABLE: with X-Forwarded-For ", "Mend: `hops` is 1 too high: lower it by 1"},
		},
		{
			name: "one hop too many, but verified", nginx: appends,
			site:   proxied("client {\ntrusted_proxies static 127.0.0.3/32 127.0.0.1/32\nhops 2\n}"),
			status: 10, says: []string{"SPOOFABLE", "Mend: trusted_proxies contains the address that you come from"},
		},
		{
			name: "one hop too many, verified, and the caller is no proxy", nginx: "proxy_bind 127.0.0.3; " + appends,
			site:   proxied("client {\ntrusted_proxies static 127.0.0.3/32\nhops 2\n}"),
			status: 0, says: []string{"SPOOF-PROOF", "Note: short_chain"},
		},
		{
			name: "trusted by Caddy's own trusted_proxies, which read from the left", nginx: appends,
			globals: "servers {\ntrusted_proxies static 127.0.0.1/32\n}", site: "edge_limit\nedge_limit_probe /client-ip",
			status: 0, says: []string{"SPOOF-PROOF", "server"},
		},
		{
			name: "nobody is trusted", nginx: appends, site: "edge_limit\nedge_limit_probe /client-ip",
			status: 12, says: []string{"OVER-GROUPED", "Mend: a private peer that is not trusted", "trusted_proxies static 127.0.0.0/8"},
		},
		{
			name: "one address, replaced", nginx: "proxy_set_header X-Forwarded-For $remote_addr;",
			site:   proxied("client {\ntrusted_proxies static 127.0.0.1/32\nsingle_value\n}"),
			status: 0, says: []string{"SPOOF-PROOF"},
		},
		{
			name: "one address, but appended", nginx: appends,
			site:   proxied("client {\ntrusted_proxies static 127.0.0.1/32\nsingle_value\n}"),
			status: 11, says: []string{"UNRESOLVED: with X-Forwarded-For (one entry)", "let the proxy replace what came"},
		},
		{
			name: "another header, passed on", nginx: appends,
			site:   proxied("client {\ntrusted_proxies static 127.0.0.1/32\nheader X-Real-IP\n}"),
			status: 10, says: []string{"SPOOFABLE: with X-Real-IP ", "proxy_set_header X-Real-IP $remote_addr;"},
		},
		{
			name: "another header, set", nginx: "proxy_set_header X-Real-IP $remote_addr;",
			site:   proxied("client {\ntrusted_proxies static 127.0.0.1/32\nheader X-Real-IP\n}"),
			status: 0, says: []string{"SPOOF-PROOF"},
		},
		{
			name: "an address that nobody here has", nginx: "proxy_set_header X-Forwarded-For 10.11.12.13;", site: proxied(oneHop),
			status: 12, says: []string{"OVER-GROUPED: you are resolved to 10.11.12.13"},
		},
		{
			name: "a limit", nginx: appends, site: proxied(oneHop + "\nlimit few 5/h"),
			status: 1, says: []string{"Error: could not tell: ", "status 429"},
		},
		{
			name: "a limit that leaves the probe out", nginx: appends,
			site:   "@limited not path /client-ip\nedge_limit @limited {\n" + oneHop + "\nlimit few 5/h\n}\nedge_limit_probe /client-ip",
			status: 0, says: []string{"SPOOF-PROOF"},
		},
		{
			name: "no probe", nginx: appends, site: "edge_limit\nrespond 404",
			status: 1, says: []string{"Error: could not tell: no probe is there: status 404", "edge_limit_probe"},
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			needLoopbackNetwork(t)
			addr := freeAddr(t)
			startCaddy(t, row.globals, site(addr, row.site))
			_, tlsURL := nginxFront(t, addr, row.nginx)
			prove(t, "--insecure", "--http1.1", "--http2", tlsURL+"client-ip").want(t, row.status, row.says...)
		})
	}
}

// A CDN before nginx, and a Caddy that is told of nginx only: everybody who comes
// through one edge of the CDN is one client.
func TestProveOneHopTooFew(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	addr := freeAddr(t)
	startCaddy(t, "", site(addr, proxied(oneHop)))
	inner, _ := nginxFront(t, addr, appends)
	outer, _ := nginxFront(t, inner[len("http://"):len(inner)-1], appends+" proxy_bind 127.0.0.2;")

	prove(t, "--expect", "127.0.0.1", outer+"client-ip").want(t, 12, "OVER-GROUPED: you are resolved to 127.0.0.2, and 127.0.0.1 was expected", "raise `hops`")
	prove(t, outer+"client-ip").want(t, 12, "OVER-GROUPED", "further addresses came with the request")
	prove(t, "--expect", "127.0.0.1", inner+"client-ip").want(t, 0, "SPOOF-PROOF")
}

func TestProveWithNothingInFront(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name, globals, site string
		status              int
		says                []string
	}{
		{"right", "", proxied("client connection"), 0, []string{"SPOOF-PROOF", "over HTTP/1.1", "over HTTP/2.0"}},
		{"right by default", "", "edge_limit\nedge_limit_probe /client-ip", 0, []string{"SPOOF-PROOF"}},
		{
			"trust in everyone", "", proxied("client {\ntrusted_proxies static 0.0.0.0/0 ::/0\n}"),
			10, []string{"SPOOFABLE: with X-Forwarded-For ", "If nothing stands in front, write `client connection`"},
		},
		{
			"the PROXY protocol from everyone", "servers {\nlistener_wrappers {\nproxy_protocol {\nallow 127.0.0.0/8\n}\ntls\n}\n}", proxied("client connection"),
			10, []string{"SPOOFABLE: with PROXY protocol ", "Mend: the listener believes the PROXY protocol from everybody"},
		},
		{"without edge_limit", "", "edge_limit_probe /client-ip", 11, []string{"Mend: no edge_limit came before the probe"}},
		{"a redirect", "", "redir /client-ip https://example.com/client-ip\nedge_limit", 1, []string{"redirects to https://example.com/client-ip, and is not followed"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			addr := freeAddr(t)
			startCaddy(t, row.globals, tlsSite(addr, row.site))
			prove(t, "--insecure", "--http1.1", "--http2", "https://localhost:"+portOf(addr)+"/client-ip").want(t, row.status, row.says...)
		})
	}
}

func TestProveNothing(t *testing.T) {
	t.Parallel()
	addr := freeAddr(t)
	prove(t, "http://"+addr+"/client-ip").want(t, 1, "Error: could not tell: nothing answers at "+addr)
	prove(t, "--json", "http://"+addr+"/client-ip").want(t, 1, `"verdict": "could not tell"`)
	prove(t, "--expct", "127.0.0.1", "http://"+addr).want(t, 1, "unknown flag")
	prove(t).want(t, 1, "accepts 1 arg")
	prove(t, "--help").want(t, 0, "spoof-proof", "over-grouped")
}
