package edgelimit

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// resolveCase is one case of testdata/resolve.json: a configuration, a request,
// and who its client is. The cases run here through the resolver alone, and in
// module_test.go over sockets.
type resolveCase struct {
	ID      string
	Why     string
	Server  string   // a key of serverOptions
	Client  []string // lines of the client block, or the one word connection
	Options []string // further lines of the directive
	Peer    string   // an address, or "unix"
	Lines   []string // raw header lines
	Want    struct {
		Client  *string // nil: unresolved
		Source  string
		Reason  string              // if unresolved, "" stands for any
		XFF     []string            // what the upstream gets in X-Forwarded-For
		Headers map[string][]string // and in other headers, by name in small letters
	}
}

// serverOptions are lines of the global option servers.
var serverOptions = map[string]string{
	"":                   "",
	"lax":                "trusted_proxies static " + trustedRanges,
	"strict":             "trusted_proxies static " + trustedRanges + "\ntrusted_proxies_strict",
	"strict-spelled":     "trusted_proxies static " + trustedRanges + "\ntrusted_proxies_strict\nclient_ip_headers x-forwarded-FOR",
	"strict-real-ip":     "trusted_proxies static " + trustedRanges + "\ntrusted_proxies_strict\nclient_ip_headers X-Real-IP",
	"strict-two-headers": "trusted_proxies static " + trustedRanges + "\ntrusted_proxies_strict\nclient_ip_headers X-Forwarded-For X-Real-IP",
	"unix":               "trusted_proxies_unix",
	"unix-strict":        "trusted_proxies static " + trustedRanges + "\ntrusted_proxies_unix\ntrusted_proxies_strict",
}

func loadResolveCases(t testing.TB) (cases []resolveCase) {
	t.Helper()
	text, err := os.ReadFile("testdata/resolve.json")
	if err != nil {
		t.Fatal(err)
	}
	decoder := json.NewDecoder(strings.NewReader(string(text)))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&cases); err != nil {
		t.Fatal(err)
	}
	seen := make(map[string]bool)
	for i := range cases {
		c := &cases[i]
		if _, known := serverOptions[c.Server]; !known || seen[c.ID] || c.Why == "" || c.Want.Source == "" {
			t.Fatalf("case %q is not well formed", c.ID)
		}
		seen[c.ID] = true
	}
	return cases
}

// clientText is the client option as it stands in a Caddyfile.
func (c *resolveCase) clientText() string { return clientText(c.Client) }

func clientText(lines []string) string {
	switch {
	case len(lines) == 0:
		return ""
	case slices.Equal(lines, []string{"connection"}):
		return "client connection\n"
	}
	return "client {\n" + strings.Join(lines, "\n") + "\n}\n"
}

func (c *resolveCase) reasonIs(reason string) bool {
	return reason == c.Want.Reason || c.Want.Client == nil && c.Want.Reason == ""
}

// remoteAddr is the peer as net/http writes it.
func (c *resolveCase) remoteAddr() string { return remoteAddrOf(c.Peer) }

func remoteAddrOf(peer string) string {
	if peer == "unix" {
		return "@"
	}
	return net.JoinHostPort(peer, "40000")
}

// newTestContext makes a context for provisioning modules that is cleaned up
// when the test ends.
func newTestContext(t testing.TB, config *caddy.Config) caddy.Context {
	t.Helper()
	apps := config.AppsRaw
	config.AppsRaw = nil // to be loaded in the context that can be cancelled
	config.StorageRaw = json.RawMessage(fmt.Sprintf(`{"module": "file_system", "root": %q}`, t.TempDir()))
	config.Logging = &caddy.Logging{Logs: map[string]*caddy.CustomLog{
		"default": {BaseLog: caddy.BaseLog{WriterRaw: json.RawMessage(`{"output": "discard"}`)}},
	}}
	base, err := caddy.ProvisionContext(config)
	if err != nil {
		t.Fatal(err)
	}
	config.AppsRaw = apps
	ctx, cancel := caddy.NewContext(base)
	t.Cleanup(cancel)
	return ctx
}

func adaptForTest(t testing.TB, caddyfile string) *caddy.Config {
	t.Helper()
	text, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(caddyfile), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		t.Fatalf("%v\n%s", err, caddyfile)
	}
	config := new(caddy.Config)
	if err := json.Unmarshal(text, config); err != nil {
		t.Fatal(err)
	}
	return config
}

// newTestServers provisions one server of Caddy's for each of serverOptions.
func newTestServers(t testing.TB) map[string]*caddyhttp.Server {
	t.Helper()
	var options, sites strings.Builder
	ports := make(map[string]string)
	for name, lines := range serverOptions {
		listen := fmt.Sprintf(":%d", 20001+len(ports))
		ports[listen] = name
		if lines != "" {
			fmt.Fprintf(&options, "servers %s {\n%s\n}\n", listen, lines)
		}
		fmt.Fprintf(&sites, "http://%s {\nrespond ok\n}\n", listen)
	}
	config := adaptForTest(t, "{\nadmin off\nauto_https off\n"+options.String()+"}\n"+sites.String())
	app, err := newTestContext(t, config).App("http")
	if err != nil {
		t.Fatal(err)
	}
	servers := make(map[string]*caddyhttp.Server)
	for _, server := range app.(*caddyhttp.App).Servers {
		servers[ports[server.Listen[0]]] = server
	}
	return servers
}

// newTestClient makes a Client of the lines of a client block.
func newTestClient(t testing.TB, lines []string) *Client {
	t.Helper()
	client := new(Client)
	if text := clientText(lines); text != "" {
		d := caddyfile.NewTestDispenser(text)
		d.Next()
		if err := client.unmarshalCaddyfile(d); err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
	}
	if err := client.provision(newTestContext(t, new(caddy.Config))); err != nil {
		t.Fatal(err)
	}
	return client
}

// newTestRequest reads a request as net/http would and has Caddy prepare it: who
// is trusted by the server, and what Caddy takes for the client, is its own work.
func newTestRequest(t testing.TB, server *caddyhttp.Server, remoteAddr, text string) *http.Request {
	t.Helper()
	r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(text)))
	if err != nil {
		t.Fatalf("%v: %.200q", err, text)
	}
	r.RemoteAddr = remoteAddr
	return prepared(r, server)
}

func prepared(r *http.Request, server *caddyhttp.Server) *http.Request {
	var local net.Addr = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 80}
	if r.RemoteAddr == "@" {
		local = &net.UnixAddr{Name: "/run/caddy.sock", Net: "unix"}
	}
	r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, local))
	return caddyhttp.PrepareRequest(r, caddy.NewReplacer(), httptest.NewRecorder(), server)
}

// newTestHandler provisions a handler with the lines of its directive.
func newTestHandler(t testing.TB, lines string) *Handler {
	t.Helper()
	config := adaptForTest(t, "{\nadmin off\nauto_https off\n}\nhttp://:20001 {\nedge_limit {\n"+lines+"\n}\n}\n")
	app, err := newTestContext(t, config).App("http")
	if err != nil {
		t.Fatal(err)
	}
	for _, server := range app.(*caddyhttp.App).Servers {
		for _, route := range server.Routes {
			if handler := findTestHandler(route.Handlers); handler != nil {
				return handler
			}
		}
	}
	t.Fatal("there is no handler")
	return nil
}

func findTestHandler(handlers []caddyhttp.MiddlewareHandler) *Handler {
	for _, handler := range handlers {
		switch handler := handler.(type) {
		case *Handler:
			return handler
		case *caddyhttp.Subroute:
			for _, route := range handler.Routes {
				if found := findTestHandler(route.Handlers); found != nil {
					return found
				}
			}
		}
	}
	return nil
}

// serveTest runs the handler and returns the status of what came of it. next may
// be nil.
func serveTest(t testing.TB, h *Handler, r *http.Request, next func(*http.Request)) int {
	t.Helper()
	w := httptest.NewRecorder()
	err := h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
		if next != nil {
			next(r)
		}
		return nil
	}))
	if err == nil {
		return w.Code
	}
	handlerError, ok := err.(caddyhttp.HandlerError)
	if !ok {
		t.Fatal(err)
	}
	return handlerError.StatusCode
}

// checkResolution checks what must hold for every resolution.
func checkResolution(t testing.TB, res *resolution) {
	t.Helper()
	if unresolved := res.source == sourceUnresolved; unresolved != (res.client == netip.Addr{}) || unresolved == res.resolved() {
		t.Errorf("source %s, but client %v", res.source, res.client)
	}
	if res.source == sourceUnresolved && res.reason == reasonNone {
		t.Error("unresolved without a reason")
	}
	if !res.resolved() {
		return
	}
	if c := res.client; c.Zone() != "" || c.Is4In6() || c.IsUnspecified() || c.IsMulticast() || c == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		t.Errorf("the client %v is not in its one form", c)
	}
	switch res.reason {
	case reasonNone, reasonShortChain, reasonUnverifiedHop, reasonUntrustedHeader:
	default:
		t.Errorf("the client %v is resolved, and the reason %s says why it is not", res.client, res.reason)
	}
}

func TestCases(t *testing.T) {
	servers := newTestServers(t)
	clients := make(map[string]*Client)
	for _, c := range loadResolveCases(t) {
		text := c.clientText()
		if clients[text] == nil {
			clients[text] = newTestClient(t, c.Client)
		}
		client := clients[text]
		t.Run(c.ID, func(t *testing.T) {
			r := newTestRequest(t, servers[c.Server], c.remoteAddr(), requestText("GET /", c.Lines...))
			before := r.Header.Clone()
			res := client.resolve(r, varsOf(r))
			got := "unresolved"
			if res.resolved() {
				got = res.client.String()
			}
			if want := orUnresolved(c.Want.Client); got != want || res.source.String() != c.Want.Source || !c.reasonIs(res.reason.String()) {
				t.Errorf("%s by %s (%q), want %s by %s (%q): %s", got, res.source, res.reason, want, c.Want.Source, c.Want.Reason, c.Why)
			}
			checkResolution(t, &res)
			if again := client.resolve(r, varsOf(r)); again.client != res.client || again.source != res.source || again.reason != res.reason {
				t.Errorf("the second time %v by %s", again.client, again.source)
			}
			if fmt.Sprint(before) != fmt.Sprint(r.Header) {
				t.Error("resolving changed the header")
			}
		})
	}
}

// What the peer's address can look like, and what is left of it.
func TestPeer(t *testing.T) {
	tcp := net.Addr(&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 80})
	unix := net.Addr(&net.UnixAddr{Name: "/run/caddy.sock", Net: "unix"})
	for _, test := range []struct {
		why        string
		remoteAddr string
		local      net.Addr
		want       string // the client without any trust; "" for unresolved
		isUnix     bool
	}{
		{"IPv4", "198.51.100.9:4711", tcp, "198.51.100.9", false},
		{"IPv6", "[2001:db8::9]:4711", tcp, "2001:db8::9", false},
		{"a zone is local to this machine", "[fe80::9%eth0]:4711", tcp, "fe80::9", false},
		{"IPv4-mapped", "[::ffff:198.51.100.9]:4711", tcp, "198.51.100.9", false},
		{"port 0", "198.51.100.9:0", tcp, "198.51.100.9", false},
		{"no port is no peer of net/http", "198.51.100.9", tcp, "", false},
		{"nothing", "", tcp, "", false},
		{"a name", "client.example:80", tcp, "", false},
		{"unspecified", "0.0.0.0:80", tcp, "", false},
		{"multicast", "224.0.0.1:80", tcp, "", false},
		{"a Unix socket without a name", "@", unix, "", true},
		{"a Unix socket with a path", "/tmp/client.sock", unix, "", true},
		{"a Unix socket without anything", "", unix, "", true},
		{"a Unix socket whose name, chosen by the peer, looks like an address", "198.51.100.9:80", unix, "", true},
		{"or like a trusted proxy's", "127.0.0.2:80", unix, "", true},
		{"@ alone does not make a Unix socket", "@", tcp, "", false},
	} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.RemoteAddr = test.remoteAddr
		r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, test.local))
		peer, isUnix := peerOf(r.RemoteAddr, test.local)
		if isUnix != test.isUnix {
			t.Errorf("%s (%s): on a Unix socket is %t, want %t", test.why, test.remoteAddr, isUnix, test.isUnix)
		}
		want, _ := netip.ParseAddr(test.want)
		if peer != want {
			t.Errorf("%s (%s): peer %v, want %v", test.why, test.remoteAddr, peer, want)
		}
		r.Header.Set("X-Forwarded-For", forgedIP)
		for _, lines := range [][]string{nil, {"trusted_proxies static 127.0.0.2"}, {"connection"}} {
			res := newTestClient(t, lines).resolve(r, nil)
			checkResolution(t, &res)
			if want.IsValid() && res.client != want || !want.IsValid() && res.reason != reasonNoAddress {
				t.Errorf("%s (%s) with %q: client %v (%s), want %q", test.why, test.remoteAddr, lines, res.client, res.reason, test.want)
			}
		}
	}
}

// A header that Go's own parser would not produce must not bring the resolver
// into a state that has no name.
func TestOddHeaders(t *testing.T) {
	for _, test := range []struct {
		why    string
		values []string
		want   reason
	}{
		{"no values", []string{}, reasonMissingHeader},
		{"nil", nil, reasonMissingHeader},
		{"an empty value", []string{""}, reasonMalformed},
		{"two empty values", []string{"", ""}, reasonMalformed},
		{"a line feed", []string{"203.0.113.7\n"}, reasonMalformed},
		{"NUL", []string{"\x00"}, reasonMalformed},
		{"a megabyte of commas", []string{strings.Repeat(",", 1<<20)}, reasonMalformed},
		{"a megabyte of digits", []string{strings.Repeat("1", 1<<20)}, reasonMalformed},
	} {
		for _, lines := range [][]string{
			{"trusted_proxies static 127.0.0.0/8"},
			{"trusted_proxies static 127.0.0.0/8", "hops 1"},
			{"trusted_proxies static 127.0.0.0/8", "header Forwarded"},
		} {
			client := newTestClient(t, lines)
			r := prepared(&http.Request{Header: http.Header{client.Header: test.values}, RemoteAddr: "127.0.0.2:1", URL: httptest.NewRequest(http.MethodGet, "/", nil).URL}, nil)
			res := client.resolve(r, varsOf(r))
			checkResolution(t, &res)
			if res.reason != test.want {
				t.Errorf("%s, %q: %v (%s), want %s", test.why, lines, res.client, res.reason, test.want)
			}
		}
	}
}

// However long the chain, resolving takes no more memory: 64 entries are read.
func TestResolveAllocations(t *testing.T) {
	servers := newTestServers(t)
	proxies := strings.Repeat("10.0.0.2, ", 10_000)
	for _, test := range []struct {
		why    string
		server string
		lines  []string
		header string
		most   float64
	}{
		{"walk", "", []string{"trusted_proxies static " + trustedRanges}, "X-Forwarded-For: " + forgedIP + ", " + visitor + ", 10.0.0.2", 0},
		{"walk of trusted proxies only", "", []string{"trusted_proxies static " + trustedRanges}, "X-Forwarded-For: " + proxies + "10.0.0.2", 0},
		{"walk to a word", "", []string{"trusted_proxies static " + trustedRanges}, "X-Forwarded-For: " + proxies + "unknown", 0},
		{"hops 64", "", []string{"trusted_proxies static " + trustedRanges, "hops 64"}, "X-Forwarded-For: " + proxies + "10.0.0.2", 0},
		{"single_value", "", []string{"trusted_proxies static " + trustedRanges, "single_value"}, "X-Forwarded-For: " + proxies + "10.0.0.2", 0},
		{"Forwarded", "", []string{"trusted_proxies static " + trustedRanges, "header Forwarded"}, "Forwarded: " + strings.Repeat("for=10.0.0.2;by=\"a,b\", ", 10_000) + "for=10.0.0.3", 0},
		{"connection", "", nil, "X-Forwarded-For: " + proxies + "10.0.0.2", 0},
		{"lax server", "lax", nil, "X-Forwarded-For: " + proxies + "10.0.0.2", 1},
	} {
		client := newTestClient(t, test.lines)
		r := newTestRequest(t, servers[test.server], trustedPeer+":40000", requestText("GET /", test.header))
		vars := varsOf(r)
		if allocations := testing.AllocsPerRun(20, func() { client.resolve(r, vars) }); allocations > test.most {
			t.Errorf("%s: %v allocations for each request, want at most %v", test.why, allocations, test.most)
		}
	}
	// a strict server's answer has to be compared with what Caddy makes of each
	// entry, which is text: some for each entry read, and no more
	client := newTestClient(t, nil)
	r := newTestRequest(t, servers["strict"], trustedPeer+":40000", requestText("GET /", "X-Forwarded-For: "+visitor+", "+proxies+"10.0.0.2"))
	vars := varsOf(r)
	if allocations := testing.AllocsPerRun(20, func() { client.resolve(r, vars) }); allocations > 8*maxHops {
		t.Errorf("strict server: %v allocations for each request", allocations)
	}
}

// The model of the rules, as slow and as plain as it can be: it knows what each
// entry means because it wrote the text for it, takes the chain as one list, and
// looks at it from the right.

// modelEntry is an entry of a chain, with what it means to us and to Caddy.
type modelEntry struct {
	text  string // in a list
	addr  string // what address it is, in its one form; "" for none
	caddy string // what Caddy's own reading makes of it; "" if it skips it
}

var modelEntries = []modelEntry{
	// proxies
	{"10.0.0.2", "10.0.0.2", "10.0.0.2"},
	{"10.0.0.2", "10.0.0.2", "10.0.0.2"},
	{"10.0.0.3:8080", "10.0.0.3", "10.0.0.3"},
	{"127.0.0.2", "127.0.0.2", "127.0.0.2"},
	{"::ffff:10.0.0.4", "10.0.0.4", "::ffff:10.0.0.4"},
	{"[::ffff:10.0.0.5]:443", "10.0.0.5", "::ffff:10.0.0.5"},
	// others
	{"203.0.113.7", "203.0.113.7", "203.0.113.7"},
	{"203.0.113.8:51234", "203.0.113.8", "203.0.113.8"},
	{"::ffff:203.0.113.9", "203.0.113.9", "::ffff:203.0.113.9"},
	{"2001:DB8::1", "2001:db8::1", "2001:db8::1"},
	{"[2001:db8::2]", "2001:db8::2", ""},
	{"[2001:db8::3]:443", "2001:db8::3", "2001:db8::3"},
	{"fe80::1%eth0", "fe80::1", "fe80::1"},
	{"2002:0a00:0001::1", "2002:a00:1::1", "2002:a00:1::1"},
	{"64:ff9b::10.0.0.1", "64:ff9b::a00:1", "64:ff9b::a00:1"},
	{"127.0.1.9", "127.0.1.9", "127.0.1.9"},
	// none
	{"unknown", "", ""},
	{"", "", ""},
	{"unix:", "", ""},
	{"1.2.3", "", ""},
	{"010.0.0.1", "", ""},
	{"0.0.0.0", "", "0.0.0.0"},
	{"::", "", "::"},
	{"224.0.0.1", "", "224.0.0.1"},
	{"203.0.113.7:99999", "", "203.0.113.7"},
	{"203.0.113.7%eth0", "", "203.0.113.7"},
	{`"203.0.113.7"`, "", ""},
}

// forwardedText writes the entry as an element of Forwarded.
func (e *modelEntry) forwardedText(random *rand.Rand) string {
	node := e.text
	if strings.ContainsAny(node, `:[]%"`) {
		node = `"` + strings.ReplaceAll(node, `"`, `\"`) + `"`
	}
	element := []string{"for=", "For=", "FOR="}[random.IntN(3)] + node
	switch random.IntN(5) {
	case 0:
		element += `;by="a, for=6.6.6.6";proto=https`
	case 1:
		element = "proto=http ; " + element
	case 2:
		element += `;host="\", for=6.6.6.6"`
	}
	return element
}

// model is a configuration in the model's words.
type model struct {
	name       string
	lines      []string // what the product is told
	server     string
	trusted    []string // ranges of the block
	unix       bool
	connection bool
	hops       int
	unverified bool
	single     bool
	forwarded  bool
	proof      bool
}

const modelSecret = "s3cret-one-0123456789abcdef"

var models = []model{
	{name: "nothing"},
	{name: "connection", lines: []string{"connection"}, connection: true, server: "lax"},
	{name: "walk", lines: []string{"trusted_proxies static 127.0.0.0/28 10.0.0.0/8"}, trusted: []string{"127.0.0.0/28", "10.0.0.0/8"}},
	{name: "walk, mapped range", lines: []string{"trusted_proxies static ::ffff:127.0.0.0/124 ::ffff:10.0.0.0/104"}, trusted: []string{"127.0.0.0/28", "10.0.0.0/8"}},
	{name: "walk, Unix", lines: []string{"trusted_proxies static 10.0.0.0/8", "trusted_proxies_unix"}, trusted: []string{"10.0.0.0/8"}, unix: true},
	{name: "walk, another header", lines: []string{"trusted_proxies static 127.0.0.0/28 10.0.0.0/8", "header x-chain"}, trusted: []string{"127.0.0.0/28", "10.0.0.0/8"}},
	{name: "walk, trusting server", lines: []string{"trusted_proxies static 10.0.0.0/8"}, trusted: []string{"10.0.0.0/8"}, server: "strict"},
	{name: "walk, Forwarded", lines: []string{"trusted_proxies static 127.0.0.0/28 10.0.0.0/8", "header Forwarded"}, trusted: []string{"127.0.0.0/28", "10.0.0.0/8"}, forwarded: true},
	{name: "hops 1", lines: []string{"trusted_proxies static 127.0.0.0/28 10.0.0.0/8", "hops 1"}, trusted: []string{"127.0.0.0/28", "10.0.0.0/8"}, hops: 1},
	{name: "hops 2", lines: []string{"trusted_proxies static 127.0.0.0/28 10.0.0.0/8", "hops 2"}, trusted: []string{"127.0.0.0/28", "10.0.0.0/8"}, hops: 2},
	{name: "hops 3", lines: []string{"trusted_proxies static 127.0.0.0/28 10.0.0.0/8", "hops 3"}, trusted: []string{"127.0.0.0/28", "10.0.0.0/8"}, hops: 3},
	{name: "hops 64", lines: []string{"trusted_proxies static 127.0.0.0/28 10.0.0.0/8", "hops 64"}, trusted: []string{"127.0.0.0/28", "10.0.0.0/8"}, hops: 64},
	{name: "hops 2, Unix", lines: []string{"trusted_proxies_unix", "hops 2"}, unix: true, hops: 2},
	{name: "hops 2, Forwarded", lines: []string{"trusted_proxies static 127.0.0.0/28 10.0.0.0/8", "hops 2", "header Forwarded"}, trusted: []string{"127.0.0.0/28", "10.0.0.0/8"}, hops: 2, forwarded: true},
	{name: "hops 2 unverified", lines: []string{"trusted_proxies static 127.0.0.0/28 10.0.0.0/8", "hops 2 unverified"}, trusted: []string{"127.0.0.0/28", "10.0.0.0/8"}, hops: 2, unverified: true},
	{name: "single_value", lines: []string{"trusted_proxies static 127.0.0.0/28 10.0.0.0/8", "single_value"}, trusted: []string{"127.0.0.0/28", "10.0.0.0/8"}, single: true},
	{name: "proof", lines: []string{"trusted_proxies static 127.0.0.0/28 10.0.0.0/8", "proof X-Edge-Proof " + modelSecret}, trusted: []string{"127.0.0.0/28", "10.0.0.0/8"}, proof: true},
	{name: "proof, trusting server", lines: []string{"proof X-Edge-Proof " + modelSecret}, proof: true, server: "lax"},
	{name: "lax server", server: "lax"},
	{name: "lax server, Unix", server: "unix"},
	{name: "strict server", server: "strict"},
	{name: "strict server, Unix", server: "unix-strict"},
	{name: "strict server of another header", server: "strict-real-ip"},
}

// modelRequest is a request in the model's words.
type modelRequest struct {
	peer        string
	present     bool // the chain's header is there
	chain       []modelEntry
	proofs      []string
	clientLines []string
}

// modelAnswer is a resolution in words.
type modelAnswer struct{ client, source, reason string }

func inAny(ranges []string, addr string) bool {
	parsed, err := netip.ParseAddr(addr)
	return err == nil && slices.ContainsFunc(ranges, func(text string) bool {
		return netip.MustParsePrefix(text).Contains(parsed)
	})
}

func (m *model) answer(q *modelRequest) modelAnswer {
	unresolved := func(reason string) modelAnswer { return modelAnswer{"", "unresolved", reason} }

	// proof first
	if m.proof && len(q.proofs) == 1 && q.proofs[0] == modelSecret {
		switch {
		case len(q.clientLines) == 0:
			return unresolved("missing_header")
		case len(q.clientLines) > 1 || strings.Contains(q.clientLines[0], ","):
			return unresolved("not_single")
		}
		for _, e := range modelEntries {
			if e.text == q.clientLines[0] {
				if e.addr == "" {
					return unresolved("malformed")
				}
				return modelAnswer{e.addr, "proof", ""}
			}
		}
		panic("the model did not write " + q.clientLines[0])
	}

	// who is the peer, and is it trusted?
	peer := strings.TrimPrefix(q.peer, "::ffff:")
	trusted, byServer := false, false
	switch {
	case m.connection:
	case len(m.trusted) > 0 || m.unix:
		trusted = q.peer == "unix" && m.unix || inAny(m.trusted, peer)
	default:
		serverRanges := []string{"127.0.0.0/28", "10.0.0.0/8"}
		if m.server == "" || m.server == "unix" {
			serverRanges = nil
		}
		trusted = q.peer == "unix" && strings.HasPrefix(m.server, "unix") || inAny(serverRanges, q.peer)
		byServer = trusted
	}
	if !trusted {
		if q.peer == "unix" {
			return unresolved("no_address")
		}
		reason := ""
		if q.present && !m.connection && (strings.HasPrefix(peer, "10.") || strings.HasPrefix(peer, "127.")) {
			reason = "untrusted_header"
		}
		return modelAnswer{peer, "connection", reason}
	}
	if !q.present {
		return unresolved("missing_header")
	}

	// the chain, nearest proxy's entry first
	fromRight := slices.Clone(q.chain)
	slices.Reverse(fromRight)
	take := func(e modelEntry, source, reason string) modelAnswer {
		if e.addr == "" {
			return unresolved("malformed")
		}
		return modelAnswer{e.addr, source, reason}
	}
	read := fromRight[:min(len(fromRight), 64)]
	switch {
	case byServer && (m.server == "strict" || m.server == "unix-strict"):
		for _, e := range read {
			if e.caddy == "" || !inAny([]string{"127.0.0.0/28", "10.0.0.0/8"}, e.caddy) {
				return take(e, "server", "")
			}
		}
		return take(read[0], "server", "")
	case byServer:
		return take(read[0], "server", "")
	case m.single:
		if len(fromRight) != 1 {
			return unresolved("not_single")
		}
		return take(read[0], "single_value", "")
	case m.hops > 0 && len(fromRight) < m.hops:
		return take(read[0], "hops", "short_chain")
	case m.hops > 0:
		for _, e := range read[:m.hops-1] {
			if !m.unverified && !inAny(m.trusted, e.addr) {
				return take(e, "hops", "unverified_hop")
			}
		}
		return take(read[m.hops-1], "hops", "")
	}
	for _, e := range read {
		if !inAny(m.trusted, e.addr) {
			return take(e, "trusted_proxies", "")
		}
	}
	return take(read[0], "trusted_proxies", "")
}

// random makes a request, in words and as text.
func (m *model) random(random *rand.Rand, header string) (modelRequest, []string) {
	var q modelRequest
	var lines []string
	q.peer = []string{trustedPeer, trustedPeer, trustedPeer, "10.0.0.9", strangePeer, "198.51.100.9", "2001:db8::9", "unix", "unix", "::ffff:10.0.0.9"}[random.IntN(10)]

	length := random.IntN(6)
	if random.IntN(20) == 0 {
		length = 60 + random.IntN(10)
	}
	for range length {
		entry := modelEntries[random.IntN(len(modelEntries))]
		if length >= 60 && random.IntN(100) > 0 || random.IntN(3) == 0 {
			entry = modelEntries[random.IntN(4)]
		}
		q.chain = append(q.chain, entry)
	}
	var line []string
	for i, entry := range q.chain {
		text := entry.text
		if m.forwarded {
			text = entry.forwardedText(random)
		}
		text = []string{"", " ", "\t"}[random.IntN(3)] + text + []string{"", " "}[random.IntN(2)]
		line = append(line, text)
		if i == len(q.chain)-1 || random.IntN(4) == 0 {
			lines = append(lines, spelled(random, header)+": "+strings.Join(line, ","))
			line = nil
		}
	}
	q.present = len(lines) > 0

	if random.IntN(3) > 0 {
		q.proofs = [][]string{{modelSecret}, {modelSecret}, {"nope"}, {modelSecret, modelSecret}, {modelSecret + "," + modelSecret}}[random.IntN(5)]
		for _, proof := range q.proofs {
			lines = append(lines, spelled(random, "X-Edge-Proof")+": "+proof)
		}
	}
	switch random.IntN(5) {
	case 0:
	case 1:
		q.clientLines = []string{forgedIP, visitor}
	case 2:
		q.clientLines = []string{forgedIP + ", " + visitor}
	default:
		q.clientLines = []string{modelEntries[random.IntN(len(modelEntries))].text}
	}
	for _, client := range q.clientLines {
		lines = append(lines, spelled(random, "X-Client-IP")+": "+client)
	}
	return q, lines
}

func spelled(random *rand.Rand, name string) string {
	switch random.IntN(3) {
	case 0:
		return strings.ToLower(name)
	case 1:
		return strings.ToUpper(name)
	}
	return name
}

// The resolver against the model, over random chains.
func TestResolverAgainstModel(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	servers := newTestServers(t)
	for i := range models {
		m := &models[i]
		t.Run(m.name, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			client := newTestClient(t, m.lines)
			failures := 0
			for range 1500 {
				q, lines := m.random(random, client.Header)
				r := newTestRequest(t, servers[m.server], remoteAddrOf(q.peer), requestText("GET /", lines...))
				res := client.resolve(r, varsOf(r))
				checkResolution(t, &res)
				got := modelAnswer{"", res.source.String(), res.reason.String()}
				if res.resolved() {
					got.client = res.client.String()
				}
				if want := m.answer(&q); got != want {
					if failures++; failures <= 3 {
						t.Errorf("seed %d, peer %s, %.500q:\n got %q\nwant %q", seed, q.peer, lines, got, want)
					}
				}
			}
			if failures > 3 {
				t.Errorf("and %d more", failures-3)
			}
		})
	}
}

// fuzzSetup is a configuration with what its nearest proxies wrote at the right
// end of the chain. Whatever a caller wrote left of that must not be believed.
type fuzzSetup struct {
	model
	peer   string
	suffix string
	want   string // the client when the caller wrote nothing, or "" for unresolved
	choice bool   // the caller may choose the answer: documented for unverified hops
	strict bool   // the caller may make it unresolved: by not being one value
}

func fuzzSetups() (setups []fuzzSetup) {
	for _, m := range models {
		name := m.name
		add := func(peer, suffix, want string) {
			setups = append(setups, fuzzSetup{model: m, peer: peer, suffix: suffix, want: want, choice: m.unverified, strict: m.single})
		}
		switch {
		case m.forwarded:
			add(trustedPeer, "for=203.0.113.7", visitor)
			add(trustedPeer, `for="[2001:db8::1]:443";by="a,b"`, "2001:db8::1")
			add(trustedPeer, "for=unknown", "")
			if m.hops != 1 {
				add(trustedPeer, "for=203.0.113.7, for=10.0.0.2", visitor)
			}
		case strings.Contains(name, "Unix") && m.hops == 0:
			add("unix", "203.0.113.7", visitor)
			add("unix", "unknown", "")
		case m.connection || name == "nothing":
			add(strangePeer, "203.0.113.7", strangePeer)
			add("unix", "203.0.113.7", "")
		case m.server == "lax" || m.server == "strict-real-ip":
			add(trustedPeer, "203.0.113.7", visitor)
			add(trustedPeer, "10.0.0.2", "10.0.0.2")
			add(trustedPeer, "unknown", "")
			add(strangePeer, "203.0.113.7", strangePeer)
		case m.hops == 0 && !m.single && inAny(m.trusted, trustedPeer) || m.server == "strict" && m.trusted == nil:
			add(trustedPeer, "203.0.113.7", visitor)
			add(trustedPeer, "203.0.113.7:80, 10.0.0.2", visitor)
			add(trustedPeer, "[2001:db8::1]:443, 10.0.0.2, 10.0.0.2", "2001:db8::1")
			add(trustedPeer, "unknown", "")
			add(strangePeer, "203.0.113.7", strangePeer)
		case m.hops == 1 || m.hops == 64 || m.single:
			add(trustedPeer, "203.0.113.7", visitor)
			add(trustedPeer, "unknown", "")
			add(strangePeer, "203.0.113.7", strangePeer)
		case m.hops > 0 && !m.unix:
			add(trustedPeer, "203.0.113.7", visitor)
			add(strangePeer, "203.0.113.7", strangePeer)
		}
	}
	return setups
}

// FuzzResolve gives the resolver what callers may write, alone and left of what
// a proxy wrote. The oracles know nothing of how a chain is read: the answer has
// one form, does not depend on the caller, and is never what only he wrote.
func FuzzResolve(f *testing.F) {
	for _, c := range loadResolveCases(f) {
		var values []string
		for _, line := range c.Lines {
			name, value, _ := strings.Cut(line, ":")
			if n := strings.ToLower(name); n == "x-forwarded-for" || n == "forwarded" {
				values = append(values, strings.TrimSpace(value))
			}
		}
		if len(c.Lines) > 0 {
			f.Add(uint(len(values)), strings.Join(values, "\n"), c.remoteAddr(), "")
		}
	}
	for i := range fuzzSetups() {
		f.Add(uint(i), "10.0.0.2, unknown, [::1]\n"+`for="x`, "127.0.0.2:1", modelSecret)
		f.Add(uint(i), `for="[2001:db8::6]`+"\n,", "[fe80::1%eth0]:80", "nope")
	}

	servers := newTestServers(f)
	setups := fuzzSetups()
	clients := make([]*Client, len(setups))
	for i := range setups {
		clients[i] = newTestClient(f, setups[i].lines)
	}
	resolve := func(i int, remoteAddr string, header http.Header) resolution {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.RemoteAddr, r.Header = remoteAddr, header
		r = prepared(r, servers[setups[i].server])
		return clients[i].resolve(r, varsOf(r))
	}

	f.Fuzz(func(t *testing.T, choice uint, callers, peer, secret string) {
		i := int(choice % uint(len(setups)))
		s, client := &setups[i], clients[i]
		lines := strings.Split(callers, "\n")

		// alone, from any peer
		header := http.Header{client.Header: lines}
		if secret != "" {
			header["X-Edge-Proof"] = []string{secret}
			header["X-Client-Ip"] = lines
		}
		res := resolve(i, peer, header)
		checkResolution(t, &res)
		if again := resolve(i, peer, header); again.client != res.client || again.source != res.source || again.reason != res.reason {
			t.Fatalf("%s: %v, and the second time %v", s.name, res.client, again.client)
		}
		if res.source == sourceProof && secret != modelSecret {
			t.Errorf("%s: %q passed for the secret", s.name, secret)
		}
		if res.resolved() && res.source != sourceConnection {
			// the answer, read once more, is the answer
			text := res.client.String()
			if s.forwarded && res.source != sourceProof {
				text = `for="` + text + `"`
				if res.client.Is6() {
					text = `for="[` + res.client.String() + `]"`
				}
			}
			once := header.Clone()
			once[client.Header] = []string{text}
			if secret == modelSecret {
				once["X-Client-Ip"] = []string{text}
			}
			if again := resolve(i, peer, once); again.client != res.client {
				t.Errorf("%s: %v, which is read as %v (%s)", s.name, res.client, again.client, again.reason)
			}
		}

		// left of what a proxy wrote: as lines of their own, and in its line
		for _, chain := range [][]string{
			{s.suffix},
			append(slices.Clone(lines), s.suffix),
			append(slices.Clone(lines), forgedIP, s.suffix),
			append(slices.Clone(lines[:len(lines)-1]), lines[len(lines)-1]+", "+s.suffix),
			append(slices.Clone(lines[:len(lines)-1]), lines[len(lines)-1]+", "+forgedIP+", "+s.suffix),
		} {
			res := resolve(i, remoteAddrOf(s.peer), http.Header{client.Header: chain, "X-Edge-Proof": {"nope"}, "X-Client-Ip": {forgedIP}})
			checkResolution(t, &res)
			got := ""
			if res.resolved() {
				got = res.client.String()
			}
			if got == forgedIP && !s.choice {
				t.Errorf("%s: %q: the client is what the caller wrote", s.name, chain)
			}
			if got != s.want && !s.choice && !(s.strict && got == "") {
				t.Errorf("%s: %q: the client is %q, want %q", s.name, chain, got, s.want)
			}
		}
	})
}
