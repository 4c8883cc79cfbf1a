package edgelimit

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/caddyserver/caddy/v2"
)

// watched is an instance whose log the test reads.
type watched struct {
	*instance
	logs *observer.ObservedLogs
}

// newSiteName is a line of the directive that makes a site unlike all others:
// warnings are said once in a process and site.
func newSiteName() string { return fmt.Sprintf("strip X-Warn-%d", warningRuns.Add(1)) }

func watch(t *testing.T, caddyfile string) watched {
	t.Helper()
	core, logs := observer.New(zapcore.InfoLevel)
	observedCores.Store(t.Name(), core)
	t.Cleanup(func() { observedCores.Delete(t.Name()) })
	config := configOf(t, caddyfile)
	config.Logging = &caddy.Logging{Logs: map[string]*caddy.CustomLog{"default": {BaseLog: caddy.BaseLog{
		WriterRaw: json.RawMessage(`{"output": "discard"}`),
		CoreRaw:   json.RawMessage(fmt.Sprintf(`{"module": "edge_limit_observer", "test": %q}`, t.Name())),
	}}}}
	i, err := tryInstance(t, config)
	if err != nil {
		t.Fatal(err)
	}
	return watched{i, logs}
}

// lines are what this module has logged from a level on, each as JSON.
func (w watched) lines(t *testing.T, from zapcore.Level) (lines []string) {
	t.Helper()
	for _, entry := range w.logs.All() {
		if entry.Level < from || !strings.Contains(entry.LoggerName, "edge_limit") {
			continue
		}
		fields := entry.ContextMap()
		fields["message"] = entry.Message
		text := new(strings.Builder)
		encoder := json.NewEncoder(text)
		encoder.SetEscapeHTML(false)
		if err := encoder.Encode(fields); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, strings.TrimSpace(text.String()))
	}
	return lines
}

// onlyWarning expects one warning, which says all the parts and none of the
// secrets, or no warning where there are no parts.
func (w watched) onlyWarning(t *testing.T, parts []string, secrets ...string) {
	t.Helper()
	lines := w.lines(t, zapcore.WarnLevel)
	if len(parts) == 0 {
		if len(lines) > 0 {
			t.Errorf("warnings %q, want none", lines)
		}
		return
	}
	if len(lines) != 1 {
		t.Fatalf("%d warnings, want one: %q", len(lines), lines)
	}
	for _, part := range parts {
		if !strings.Contains(lines[0], part) {
			t.Errorf("the warning does not say %q: %s", part, lines[0])
		}
	}
	for _, secret := range secrets {
		if strings.Contains(lines[0], secret) {
			t.Errorf("the warning says %q: %s", secret, lines[0])
		}
	}
}

// A doubtful or failed resolution is warned of once in a process and site: with
// its reason and the mend, and with a range in the place of an address.
func TestWarningOfResolution(t *testing.T) {
	const (
		ranges = "client {\ntrusted_proxies static 10.0.0.0/8\n"
		proof  = "client {\nproof Proxy-Authorization correct-horse-battery-staple\n"
	)
	for _, row := range []struct {
		reason  string
		client  string
		peer    string
		headers []string
		want    []string
		secrets []string // addresses and the like that must not be in it
	}{
		{"resolved from the connection", "", alice, nil, nil, nil},
		{"resolved through a proxy", ranges + "}", "10.0.0.1", []string{"X-Forwarded-For: " + alice}, nil, nil},
		{"a forged header of a public peer is no mistake", "", alice, []string{"X-Forwarded-For: 6.6.6.6"}, nil, nil},
		{"a header of a private peer where nothing stands in front", "client connection", "10.9.8.7", []string{"X-Forwarded-For: " + alice}, nil, nil},

		{"a chain from 127.0.0.0/8", "", "127.9.8.7", []string{"X-Forwarded-For: 6.6.6.6, " + alice},
			[]string{"untrusted_header", "trusted_proxies static 127.0.0.0/8", "client connection"}, []string{"127.9.8.7", alice, "6.6.6.6"}},
		{"a chain from 10.0.0.0/8", "", "10.9.8.7", []string{"X-Forwarded-For: " + alice},
			[]string{"untrusted_header", "trusted_proxies static 10.0.0.0/8"}, []string{"10.9.8.7", alice}},
		{"a chain from 172.16.0.0/12", "", "172.20.8.7", []string{"X-Forwarded-For: " + alice},
			[]string{"trusted_proxies static 172.16.0.0/12"}, []string{"172.20.8.7", alice}},
		{"a chain from 192.168.0.0/16", "", "192.168.8.7", []string{"X-Forwarded-For: " + alice},
			[]string{"trusted_proxies static 192.168.0.0/16"}, []string{"192.168.8.7", alice}},
		{"a chain from 100.64.0.0/10", "", "100.70.8.7", []string{"X-Forwarded-For: " + alice},
			[]string{"trusted_proxies static 100.64.0.0/10"}, []string{"100.70.8.7", alice}},
		{"a chain from 169.254.0.0/16", "", "169.254.8.7", []string{"X-Forwarded-For: " + alice},
			[]string{"trusted_proxies static 169.254.0.0/16"}, []string{"169.254.8.7", alice}},
		{"a chain from fc00::/7", "", "fd12:3456::7", []string{"X-Forwarded-For: 2001:db8::99"},
			[]string{"trusted_proxies static fc00::/7"}, []string{"fd12:3456", "2001:db8"}},
		{"a chain from fe80::/10", "", "[fe80::77%eth0]:1", []string{"X-Forwarded-For: " + alice},
			[]string{"trusted_proxies static fe80::/10"}, []string{"fe80::77", alice}},
		{"a chain from IPv4 over IPv6", "", "::ffff:10.9.8.7", []string{"X-Forwarded-For: " + alice},
			[]string{"trusted_proxies static 10.0.0.0/8"}, []string{"10.9.8.7", alice}},
		{"a private peer beside the trusted range", ranges + "}", "192.168.8.7", []string{"X-Forwarded-For: " + alice},
			[]string{"trusted_proxies static 192.168.0.0/16"}, []string{"192.168.8.7", alice}},

		{"a missing header", ranges + "}", "10.9.8.7", nil,
			[]string{"missing_header", "your proxy sends no X-Forwarded-For", "proxy_set_header", "option unresolved"}, []string{"10.9.8.7"}},
		{"no address", ranges + "}", "10.9.8.7", []string{"X-Forwarded-For: secret-hello"},
			[]string{"malformed", "no address"}, []string{"10.9.8.7", "secret-hello"}},
		{"not a single one", ranges + "single_value\n}", "10.9.8.7", []string{"X-Forwarded-For: 6.6.6.6, " + alice},
			[]string{"not_single", "exactly one address"}, []string{"10.9.8.7", alice, "6.6.6.6"}},
		{"a peer without an address", "", "@", nil,
			[]string{"no_address", "trusted_proxies_unix"}, nil},
		{"a short chain", ranges + "hops 2\n}", "10.9.8.7", []string{"X-Forwarded-For: " + alice},
			[]string{"short_chain", "shorter than hops"}, []string{"10.9.8.7", alice}},
		{"a stranger among the hops", ranges + "hops 2\n}", "10.9.8.7", []string{"X-Forwarded-For: 6.6.6.6, " + alice},
			[]string{"unverified_hop", "no trusted proxy"}, []string{"10.9.8.7", alice, "6.6.6.6"}},
		{"a proof without a client", proof + "}", alice, []string{"Proxy-Authorization: correct-horse-battery-staple"},
			[]string{"missing_header", "X-Client-Ip"}, []string{alice, "correct-horse"}},
	} {
		t.Run(row.reason, func(t *testing.T) {
			caddyfile := "http://test.local {\nedge_limit {\n" + newSiteName() + "\n" + row.client + "\n}\nrespond ok\n}"
			w := watch(t, caddyfile)
			for range 20 {
				w.get(row.peer, "/", row.headers...)
			}
			w.onlyWarning(t, row.want, row.secrets...)
			for range 2 { // reloads
				again := watch(t, caddyfile)
				w.stop()
				again.get(row.peer, "/", row.headers...)
				again.onlyWarning(t, nil)
				w = again
			}
			other := watch(t, "http://test.local {\nedge_limit {\n"+newSiteName()+"\n"+row.client+"\n}\nrespond ok\n}")
			other.get(row.peer, "/", row.headers...)
			other.onlyWarning(t, row.want, row.secrets...)
		})
	}
}

// However different the requests of a flood: a reason is said once.
func TestWarningsUnderFlood(t *testing.T) {
	w := watch(t, `http://test.local {
	edge_limit {
		`+newSiteName()+`
		client {
			trusted_proxies static 10.0.0.0/8
			hops 2
		}
	}
	respond ok
}`)
	for n := range 500 {
		for _, chain := range []string{clientNumber(n), "hello" + clientNumber(n), clientNumber(n) + ", " + clientNumber(n+1)} {
			w.get("10.0.0.1", "/"+strings.ReplaceAll(chain, " ", "/"), "X-Forwarded-For: "+chain, "User-Agent: "+chain)
		}
		w.get("10.0.0.1", "/")
		w.get(fmt.Sprintf("192.168.0.%d", n%250), "/", "X-Forwarded-For: "+clientNumber(n))
	}
	lines := w.lines(t, zapcore.InfoLevel)
	expect(t, len(lines), 5, "lines")
	for _, why := range []reason{reasonShortChain, reasonMalformed, reasonUnverifiedHop, reasonMissingHeader, reasonUntrustedHeader} {
		n := 0
		for _, line := range lines {
			if strings.Contains(line, fmt.Sprintf(`"reason":%q`, why)) {
				n++
			}
		}
		expect(t, n, 1, "lines about "+why.String())
	}
}

// The first removal of a proxy's header says which line would keep the upstream's
// header alive. What callers forge is removed without a word.
func TestWarningOfRemovedHeader(t *testing.T) {
	const trusted = "client {\ntrusted_proxies static 10.0.0.0/8\n}\n"
	const chain = "X-Forwarded-For: " + alice
	for _, row := range []struct {
		reason  string
		lines   string
		peer    string
		headers []string
		want    []string // the forward lines that are named, one a warning
	}{
		{"a proxy's X-Real-IP", trusted, "10.0.0.1", []string{chain, "X-Real-IP: " + alice}, []string{"forward X-Real-Ip"}},
		{"a CDN's CF-Connecting-IP", trusted, "10.0.0.1", []string{chain, "CF-Connecting-IP: " + alice}, []string{"forward Cf-Connecting-Ip"}},
		{"two headers", trusted, "10.0.0.1", []string{chain, "X-Real-IP: " + alice, "True-Client-IP: " + alice},
			[]string{"forward True-Client-Ip", "forward X-Real-Ip"}},
		{"Forwarded", trusted, "10.0.0.1", []string{chain, "Forwarded: for=" + alice}, []string{"forward Forwarded"}},
		{"a header that the configuration strips", trusted + "strip X-Mine\n", "10.0.0.1", []string{chain, "X-Mine: " + alice}, []string{"forward X-Mine"}},
		{"it is forwarded already", trusted + "forward X-Real-IP\n", "10.0.0.1", []string{chain, "X-Real-IP: " + alice}, nil},
		{"another one is forwarded", trusted + "forward X-Real-IP\n", "10.0.0.1", []string{chain, "True-Client-IP: " + alice}, []string{"forward True-Client-Ip"}},
		{"nothing is removed with forward off", trusted + "forward off\n", "10.0.0.1", []string{chain, "X-Real-IP: " + alice}, nil},
		{"X-Forwarded-For goes on with the client", trusted, "10.0.0.1", []string{chain}, nil},
		{"the header that is read needs no line", "client {\ntrusted_proxies static 10.0.0.0/8\nheader X-Real-IP\n}\n", "10.0.0.1", []string{"X-Real-IP: " + alice}, nil},
		{"a caller's forgery", trusted, alice, []string{"X-Real-IP: 6.6.6.6", "Forwarded: for=6.6.6.6"}, nil},
		{"a proof's headers", "client {\nproof Proxy-Authorization correct-horse-battery-staple\n}\n", alice,
			[]string{"Proxy-Authorization: correct-horse-battery-staple", "X-Client-IP: " + bob}, nil},
		{"a header that is kept", trusted, "10.0.0.1", []string{chain, "X-Forwarded-Proto: https", "X-Request-Id: 1"}, nil},
	} {
		t.Run(row.reason, func(t *testing.T) {
			name := newSiteName()
			if strings.Contains(row.lines, "strip ") {
				name = ""
				row.lines = strings.ReplaceAll(row.lines, "strip ", newSiteName()+" ")
			}
			if strings.Contains(row.lines, "forward off") { // beside which strip is a mistake of its own
				name = fmt.Sprintf("limit l%d 1000/s", warningRuns.Add(1))
			}
			caddyfile := "http://test.local {\nedge_limit {\n" + name + "\n" + row.lines + "}\nrespond ok\n}"
			w := watch(t, caddyfile)
			for range 20 {
				w.get(row.peer, "/", row.headers...)
			}
			lines := w.lines(t, zapcore.WarnLevel)
			if len(lines) != len(row.want) {
				t.Fatalf("warnings %q, want %d", lines, len(row.want))
			}
			for _, want := range row.want {
				all := strings.Join(lines, "\n")
				if strings.Count(all, `"`+want+`"`) != 1 {
					t.Errorf("the line %q is not named once in %s", want, all)
				}
			}
			for _, line := range lines {
				if strings.Contains(line, alice) || strings.Contains(line, "10.0.0.1") {
					t.Errorf("an address in %s", line)
				}
			}
			again := watch(t, caddyfile) // a reload
			again.get(row.peer, "/", row.headers...)
			again.onlyWarning(t, nil)
		})
	}
}

// A part of a key that is empty at run time is warned of once, by its name and
// its limit's.
func TestWarningOfEmptyKey(t *testing.T) {
	caddyfile := `http://test.local {
	edge_limit {
		` + newSiteName() + `
		limit user 1000/h {
			key client {http.auth.user.id}
		}
		limit tenant 1000/h {
			key {http.request.header.X-Tenant} {http.request.header.X-Team}
			key_writer caller
		}
		in_flight running 100 {
			key {http.auth.user.id}
		}
	}
	respond ok
}`
	w := watch(t, caddyfile)
	for n := range 50 {
		w.get(clientNumber(n), "/", "X-Tenant: secret-tenant")
	}
	lines := w.lines(t, zapcore.WarnLevel)
	if len(lines) != 3 {
		t.Fatalf("%d warnings: %q", len(lines), lines)
	}
	all := strings.Join(lines, "\n")
	for _, part := range []string{
		`"name":"user"`, `"name":"tenant"`, `"name":"running"`, `{http.auth.user.id}`, `{http.request.header.X-Team}`, "a later handler sets",
	} {
		if !strings.Contains(all, part) {
			t.Errorf("no warning says %q: %s", part, all)
		}
	}
	for _, secret := range []string{"secret-tenant", "198.18.", "X-Tenant"} {
		if strings.Contains(all, secret) {
			t.Errorf("a warning says %q: %s", secret, all)
		}
	}
	w.get(alice, "/", "X-Team: secret-team")
	if lines := w.lines(t, zapcore.WarnLevel); len(lines) != 4 || !strings.Contains(lines[3], "{http.request.header.X-Tenant}") {
		t.Errorf("warnings when another part is empty: %q", lines)
	}
	again := watch(t, caddyfile) // a reload
	again.get(bob, "/", "X-Tenant: secret-tenant")
	again.onlyWarning(t, nil)
}

// A cost that is no positive number is warned of once.
func TestWarningOfCost(t *testing.T) {
	caddyfile := `http://test.local {
	edge_limit {
		` + newSiteName() + `
		limit weighed 1000/h {
			cost {http.request.header.X-Cost}
			key_writer caller
		}
	}
	respond ok
}`
	w := watch(t, caddyfile)
	w.get(alice, "/", "X-Cost: 3")
	w.onlyWarning(t, nil)
	for _, cost := range []string{"", "secret-cost", "0", "-1", "NaN", "+Inf", "1e999"} {
		w.get(alice, "/", "X-Cost: "+cost)
	}
	w.onlyWarning(t, []string{"weighed", "{http.request.header.X-Cost}", "counts as 1"}, "secret-cost", alice)
	again := watch(t, caddyfile) // a reload
	again.get(alice, "/", "X-Cost: 0")
	again.onlyWarning(t, nil)
}

// What a configuration gives away is said when it loads, once.
func TestWarningAtLoad(t *testing.T) {
	for _, row := range []struct {
		reason string
		lines  string
		want   []string
	}{
		{"nothing", "client {\ntrusted_proxies static 10.0.0.0/8\n}", nil},
		{"a quarter of all addresses", "client {\ntrusted_proxies static 0.0.0.0/2\n}", nil},
		{"a half: the other one is not far", "client {\ntrusted_proxies static 0.0.0.0/1 128.0.0.0/1\n}", []string{"contains every address"}},
		{"trust in every IPv4 address", "client {\ntrusted_proxies static 10.0.0.0/8 0.0.0.0/0\n}", []string{"contains every address", "0.0.0.0/0", "limits nobody"}},
		{"trust in every IPv6 address", "client {\ntrusted_proxies static ::/0\n}", []string{"contains every address", "::/0"}},
		{"the same as IPv4 in IPv6", "client {\ntrusted_proxies static ::ffff:0.0.0.0/96\n}", []string{"contains every address"}},
		{"in a second source", "client {\ntrusted_proxies static 10.0.0.0/8\ntrusted_proxies static 0.0.0.0/0\n}", []string{"contains every address"}},
		{"hops that are not verified", "client {\ntrusted_proxies static 10.0.0.0/8\nhops 2 unverified\n}", []string{"unverified", `"hops":2`, "chooses the client"}},
		{"one hop passes over nothing", "client {\ntrusted_proxies static 10.0.0.0/8\nhops 1 unverified\n}", nil},
		{"hops on a Unix socket that are not verified", "client {\ntrusted_proxies_unix\nhops 3 unverified\n}", []string{"unverified", `"hops":3`}},
		{"a key of the peer behind proxies", "client {\ntrusted_proxies static 10.0.0.0/8\n}\nlimit peers 5/m {\nkey {remote_host}\n}", []string{"{remote_host}", "peers", "write key client"}},
		{"a key of the peer where there are none", "limit peers 5/m {\nkey {remote_host}\n}", nil},
		{"a key of the client", "client {\ntrusted_proxies static 10.0.0.0/8\n}\nlimit clients 5/m", nil},
		{"a key of the peer behind proxies on a Unix socket", "client {\ntrusted_proxies_unix\n}\nlimit peers 5/m {\nkey {remote_host}\n}", []string{"{remote_host}", "peers"}},
		{"headers to remove, and forward off", "forward off", []string{"strip removes none", "X-Warn-"}},
		{"what is in flight by peer, behind proxies", "client {\ntrusted_proxies static 10.0.0.0/8\n}\nin_flight peers 5 {\nkey {remote_host}\n}", []string{"{remote_host}", "peers"}},
	} {
		t.Run(row.reason, func(t *testing.T) {
			caddyfile := "http://test.local {\nedge_limit {\n" + newSiteName() + "\n" + row.lines + "\n}\nrespond ok\n}"
			w := watch(t, caddyfile)
			w.onlyWarning(t, row.want)
			again := watch(t, caddyfile) // a reload
			again.onlyWarning(t, nil)
		})
	}
}

// A global client block is judged in each site that it holds for.
func TestWarningOfGlobalBlock(t *testing.T) {
	w := watch(t, `{
	edge_limit {
		client {
			trusted_proxies static 0.0.0.0/0
		}
	}
}
http://test.local {
	edge_limit {
		`+newSiteName()+`
	}
	respond ok
}`)
	w.onlyWarning(t, []string{"contains every address"})
}

// Where forward off is a site's exception from a global strip, nothing is wrong.
func TestWarningOfUselessStrip(t *testing.T) {
	for _, row := range []struct {
		reason        string
		global, local string
		want          []string
	}{
		{"an exception", "strip X-Global", "forward off", nil},
		{"both are global", "strip X-Global\nforward off", "", []string{"strip removes none", "X-Global"}},
		{"the site's own strip", "forward off", "strip X-Local", []string{"strip removes none", "X-Local"}},
		{"a site that forwards again", "forward off", "strip X-Local\nforward X-Real-IP", nil},
	} {
		t.Run(row.reason, func(t *testing.T) {
			limit := fmt.Sprintf("limit l%d 5/m", warningRuns.Add(1)) // a site unlike all others
			w := watch(t, "{\nedge_limit {\n"+row.global+"\n}\n}\nhttp://test.local {\nedge_limit {\n"+row.local+"\n"+limit+"\n}\nrespond ok\n}")
			w.onlyWarning(t, row.want)
		})
	}
}

// The secret of a proof is in no line, and the header that carries it is warned
// of where access logs show it.
func TestWarningOfProofHeader(t *testing.T) {
	own := fmt.Sprintf("X-Proof-%d", warningRuns.Add(1)) // a header is warned of once in a process
	for header, parts := range map[string][]string{
		own:                   {"error and access logs in clear", own, "request>headers>" + own + " delete", "Proxy-Authorization"},
		"Proxy-Authorization": nil,
		"Authorization":       nil,
	} {
		w := watch(t, "http://test.local {\nedge_limit {\n"+newSiteName()+"\nclient {\nproof "+header+" correct-horse-battery-staple\n}\n}\nrespond ok\n}")
		w.get(alice, "/", header+": correct-horse-battery-staple", "X-Client-IP: "+bob)
		w.get(alice, "/", header+": wrong-horse-battery-staple", "X-Client-IP: "+bob)
		w.onlyWarning(t, parts, "correct-horse", "wrong-horse", alice, bob)
	}
}

// One key that makes up most of a limit's traffic is warned of once; that most
// of it cannot be resolved is another thing.
func TestWarningOfDominatingKey(t *testing.T) {
	site := func() string {
		return "http://test.local {\nedge_limit {\n" + newSiteName() + "\nclient {\ntrusted_proxies static 10.0.0.0/8\n}\nlimit visits 1000000/h\n}\nrespond ok\n}"
	}
	dominating := func(line string) bool { return strings.Contains(line, "most of a limit's traffic") }
	t.Run("many clients", func(t *testing.T) {
		w := watch(t, site())
		for n := range 3000 {
			w.get(clientNumber(n%300), "/")
		}
		for _, line := range w.lines(t, zapcore.WarnLevel) {
			t.Errorf("a warning: %s", line)
		}
	})
	t.Run("one client", func(t *testing.T) {
		caddyfile := site()
		w := watch(t, caddyfile)
		for n := range 3000 {
			w.get(alice, "/")
			if n%3 == 0 {
				w.get(clientNumber(n), "/")
			}
		}
		w.onlyWarning(t, []string{"one key makes up most of a limit's traffic", "visits", "share", "edge_limit_probe"}, alice)
		again := watch(t, caddyfile) // a reload
		for range 3000 {
			again.get(alice, "/")
		}
		again.onlyWarning(t, nil)
	})
	t.Run("unresolved", func(t *testing.T) {
		w := watch(t, site())
		for range 3000 {
			w.get("10.0.0.1", "/")
		}
		var lines []string
		for _, line := range w.lines(t, zapcore.WarnLevel) {
			if dominating(line) {
				lines = append(lines, line)
			}
		}
		if len(lines) != 1 || !strings.Contains(lines[0], "cannot be resolved") || strings.Contains(lines[0], "10.0.0.1") {
			t.Errorf("warnings %q", lines)
		}
	})
}

// Of all that is logged while all kinds of requests go by, no line holds an
// address, a raw key or a secret.
func TestNoLineHoldsAnAddress(t *testing.T) {
	w := watch(t, `http://test.local {
	edge_limit {
		`+newSiteName()+`
		client {
			trusted_proxies static 10.0.0.0/8
			hops 2
			proof Proxy-Authorization correct-horse-battery-staple
		}
		limit each 2/h {
			ban 1h
		}
		limit tenant 2/h {
			key {http.request.header.X-Tenant}
		}
		in_flight running 100 {
			key client {http.auth.user.id}
		}
		ceiling all 100/h
	}
	respond ok
}`)
	for n := range 200 {
		w.get(clientNumber(n), "/", "X-Tenant: secret-tenant", "X-Forwarded-For: 6.6.6.6")
		w.get("10.0.0.1", "/", "X-Tenant: secret-tenant", "X-Forwarded-For: 6.6.6.6, "+alice)
		w.get("192.168.1.1", "/", "X-Forwarded-For: "+alice, "X-Real-IP: "+bob)
		w.get("10.0.0.1", "/", "X-Real-IP: "+bob)
		w.get(alice, "/", "Proxy-Authorization: correct-horse-battery-staple", "X-Client-IP: "+bob)
		w.get(alice, "/", "Proxy-Authorization: correct-horse-battery-staple")
	}
	lines := w.lines(t, zapcore.InfoLevel)
	if len(lines) < 5 {
		t.Errorf("%d lines, so little was tested: %q", len(lines), lines)
	}
	for _, line := range lines {
		for _, secret := range []string{"198.18.", "6.6.6.6", alice, bob, "10.0.0.1", "192.168.1.1", "secret-tenant", "correct-horse"} {
			if strings.Contains(line, secret) {
				t.Errorf("%q in %s", secret, line)
			}
		}
	}
}
