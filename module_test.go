package edgelimit

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha1"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/fileserver"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/proxyprotocol"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/templates"
	_ "github.com/caddyserver/caddy/v2/modules/filestorage"
	_ "github.com/caddyserver/caddy/v2/modules/logging"
)

// The tests in this file run a real Caddy and talk to it over sockets. Requests
// are written by hand, so that nothing between the test and the server tidies
// them up; the source address of a connection is chosen by binding to it.

const (
	forgedIP     = "6.6.6.6"      // what callers write to pass for somebody else
	forgedHost   = "evil.example" // and for another host
	trustedPeer  = "127.0.0.2"    // in trustedRanges
	strangePeer  = "127.0.1.9"    // loopback, but in no trusted range
	visitor      = "203.0.113.7"
	otherVisitor = "203.0.113.8"

	trustedRanges = "127.0.0.0/28 10.0.0.0/8"
	clientBlock   = "client {\n trusted_proxies static " + trustedRanges + "\n}\n"

	patience = 20 * time.Second // how long a test waits for what must come
)

// site is one server of a running Caddy, on a socket of its own.
type site struct {
	server string // lines of the global option servers
	body   string // the site's directives
	via    via
	named  string // named routes, which stand beside sites
}

// via is how connections reach a site.
type via string

const (
	viaTCP   via = "tcp"   // from any address of 127.0.0.0/8
	viaProxy via = "proxy" // PROXY protocol, from any address at all
	viaUnix  via = "unix"  // a Unix socket
)

// sitePort stands in Caddyfiles for a port that the system chooses.
const sitePort = "65000"

// endpoint is where a site can be reached.
type endpoint struct {
	via     via
	address string
}

// runSites starts a Caddy with the global options and sites, and stops it when
// the test ends.
func runSites(t *testing.T, global string, sites ...site) []endpoint {
	t.Helper()
	directory, err := os.MkdirTemp("", "edge") // t.TempDir is too long for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(directory) })

	endpoints := make([]endpoint, len(sites))
	binds := make([]string, len(sites))
	var caddyfile strings.Builder
	fmt.Fprintf(&caddyfile, "{\nadmin off\nauto_https off\npersist_config off\ngrace_period 2s\nstorage file_system %s\n"+
		"log {\noutput discard\n}\n%s\n", directory, global)
	for i, s := range sites {
		if s.via == "" {
			s.via = viaTCP
		}
		listen := ""
		if s.via == viaUnix {
			endpoints[i] = endpoint{s.via, filepath.Join(directory, strconv.Itoa(i))}
			binds[i] = "unix/" + endpoints[i].address
			listen = binds[i]
		} else {
			endpoints[i] = endpoint{s.via, ""}
			binds[i] = fmt.Sprintf("127.77.%d.%d", i/200, i%200+1)
			listen = binds[i] + ":" + sitePort
		}
		options := s.server
		if s.via == viaProxy {
			options += "\nlistener_wrappers {\nproxy_protocol {\nallow 127.0.0.0/8\n}\n}"
		}
		if options != "" {
			fmt.Fprintf(&caddyfile, "servers %s {\n%s\n}\n", listen, options)
		}
	}
	caddyfile.WriteString("}\n")
	for i, s := range sites {
		fmt.Fprintf(&caddyfile, "%s\nhttp://:%s {\nbind %s\n%s\n}\n", s.named, sitePort, binds[i], s.body)
	}

	config, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(caddyfile.String()), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		t.Fatalf("adapting: %v\n%s", err, caddyfile.String())
	}
	for _, warning := range warnings {
		if !strings.Contains(warning.Message, "not formatted") {
			t.Logf("adapting: %v", warning)
		}
	}
	if err := caddy.Load(bytes.ReplaceAll(config, []byte(":"+sitePort+`"`), []byte(`:0"`)), true); err != nil {
		t.Fatalf("loading: %v\n%s", err, caddyfile.String())
	}
	t.Cleanup(func() { stopCaddy(t) })

	app, err := caddy.ActiveContext().AppIfConfigured("http")
	if err != nil {
		t.Fatal(err)
	}
	for _, server := range app.(*caddyhttp.App).Servers {
		for _, listener := range server.Listeners() {
			if tcp, ok := listener.Addr().(*net.TCPAddr); ok {
				endpoints[slices.Index(binds, tcp.IP.String())].address = tcp.String()
			}
		}
	}
	return endpoints
}

func stopCaddy(t *testing.T) {
	t.Helper()
	if err := caddy.Stop(); err != nil {
		t.Error(err)
	}
}

// dial connects to the site as that peer; "unix" and "" leave it to the system.
func (e endpoint) dial(t *testing.T, peer string) net.Conn {
	t.Helper()
	dialer := net.Dialer{Timeout: patience}
	network := "tcp"
	switch e.via {
	case viaUnix:
		network = "unix"
	case viaTCP:
		if peer != "" {
			dialer.LocalAddr = &net.TCPAddr{IP: net.ParseIP(peer)}
		}
	}
	conn, err := dialer.Dial(network, e.address)
	if err != nil {
		t.Fatalf("connecting as %s: %v", peer, err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if e.via == viaProxy {
		// Go writes an IPv4-mapped peer with dots, as it does for dual-stack sockets
		if addr := netip.MustParseAddr(peer).Unmap(); addr.Is4() {
			fmt.Fprintf(conn, "PROXY TCP4 %s 127.0.0.1 40000 80\r\n", addr)
		} else {
			fmt.Fprintf(conn, "PROXY TCP6 %s ::1 40000 80\r\n", addr)
		}
	}
	return conn
}

// answer is a response with its body.
type answer struct {
	status  int
	header  http.Header
	body    string
	closing bool // Connection: close
}

// exchange writes text and reads one response.
func exchange(t *testing.T, conn net.Conn, text string) answer {
	t.Helper()
	if _, err := io.WriteString(conn, text); err != nil {
		t.Fatalf("writing %.200q: %v", text, err)
	}
	return readAnswer(t, bufio.NewReader(conn), text)
}

func readAnswer(t *testing.T, r *bufio.Reader, text string) answer {
	t.Helper()
	response, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatalf("no response to %.200q: %v", text, err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatalf("reading the response to %.200q: %v", text, err)
	}
	return answer{response.StatusCode, response.Header, string(body), response.Close}
}

// ask sends one GET request with these raw header lines from that peer.
func (e endpoint) ask(t *testing.T, peer, path string, lines ...string) answer {
	t.Helper()
	conn := e.dial(t, peer)
	defer conn.Close()
	return exchange(t, conn, requestText("GET "+path, lines...))
}

// requestText writes the head of a request to the host test.local.
func requestText(methodAndPath string, lines ...string) string {
	text := methodAndPath + " HTTP/1.1\r\nHost: test.local\r\n"
	for _, line := range lines {
		text += line + "\r\n"
	}
	return text + "\r\n"
}

// headLine is a header line as an upstream received it.
type headLine struct{ name, value string }

// upstreamHead is the head of a request as an upstream received it.
type upstreamHead []headLine

// values of a header, whose name is compared without case.
func (h upstreamHead) values(name string) []string {
	values := []string{}
	for _, line := range h {
		if strings.EqualFold(line.name, name) {
			values = append(values, line.value)
		}
	}
	return values
}

func parseHead(text string) (head upstreamHead) {
	for line := range strings.SplitSeq(text, "\r\n") {
		if name, value, ok := strings.Cut(line, ": "); ok {
			head = append(head, headLine{name, value})
		}
	}
	return head
}

// runEcho starts an upstream that answers each request with the bytes of its
// head. It is no net/http server, which would tidy up what it received.
func runEcho(t *testing.T) (address string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				for r := bufio.NewReader(conn); ; {
					var head strings.Builder
					for !strings.HasSuffix(head.String(), "\r\n\r\n") {
						line, err := r.ReadString('\n')
						if err != nil {
							return
						}
						head.WriteString(line)
					}
					fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s", head.Len(), head.String())
				}
			}()
		}
	}()
	return listener.Addr().String()
}

// received is a request as a net/http upstream received it.
type received struct {
	Proto   string
	Host    string
	Header  http.Header
	Body    string
	Trailer http.Header
}

// runRecorder starts an upstream that reads each request to its end and answers
// with what it received.
func runRecorder(t *testing.T) (address string) {
	t.Helper()
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		_ = json.NewEncoder(w).Encode(received{r.Proto, r.Host, r.Header, string(body), r.Trailer})
	}))
	t.Cleanup(upstream.Close)
	return upstream.Listener.Addr().String()
}

func parseReceived(t *testing.T, a answer) (got received) {
	t.Helper()
	if err := json.Unmarshal([]byte(a.body), &got); err != nil || a.status != http.StatusOK {
		t.Fatalf("status %d, body %.300q: %v", a.status, a.body, err)
	}
	return got
}

// wantIdentity are headers that an upstream may believe to be the client's
// address. The list is the test's own: a name that is missing in the product is
// to be found out here.
var wantIdentity = []string{
	"X-Forwarded-For", "Forwarded", "X-Real-IP", "True-Client-IP", "CF-Connecting-IP", "CF-Connecting-IPv6",
	"X-Client-IP", "Client-IP", "X-Cluster-Client-IP", "Fastly-Client-IP", "Fly-Client-IP",
	"X-Original-Forwarded-For", "Forwarded-For", "X-Envoy-External-Address",
}

// sameForCGI says whether CGI or PHP would make one variable of two names.
func sameForCGI(a, b string) bool {
	fold := func(name string) string {
		folded := []byte(name)
		for i, c := range folded {
			switch {
			case 'A' <= c && c <= 'Z':
				folded[i] = c + ' '
			case c < '0' || '9' < c && c < 'a' || 'z' < c:
				folded[i] = '_'
			}
		}
		return string(folded)
	}
	return fold(a) == fold(b)
}

// checkUpstream checks what an upstream was told: the client in X-Forwarded-For
// and nothing in any other identity header but what is expected in headers, and
// no trace of what was forged or secret.
func checkUpstream(t *testing.T, text string, xff []string, headers map[string][]string, secrets ...string) {
	t.Helper()
	head := parseHead(text)
	if got := head.values("X-Forwarded-For"); !slices.Equal(got, xff) {
		t.Errorf("the upstream received X-Forwarded-For %q, want %q", got, xff)
	}
	for name, want := range headers {
		if got := head.values(name); !slices.Equal(got, want) {
			t.Errorf("the upstream received %s %q, want %q", name, got, want)
		}
	}
	for _, line := range head {
		if strings.EqualFold(line.name, "X-Forwarded-For") {
			continue
		}
		if _, expected := headers[strings.ToLower(line.name)]; expected {
			continue
		}
		for _, name := range append(wantIdentity, secrets...) {
			if sameForCGI(name, line.name) {
				t.Errorf("the upstream received %s: %s, which passes for %s", line.name, line.value, name)
			}
		}
	}
	for _, secret := range append(secrets, forgedIP, forgedHost) {
		if strings.Contains(text, secret) {
			t.Errorf("the upstream received %q, which was forged or is secret:\n%s", secret, text)
		}
	}
}

// secretsOf lists what must not leave Caddy of a proof: names and values.
func secretsOf(client []string) (secrets []string) {
	for _, line := range client {
		fields := strings.Fields(strings.TrimSuffix(line, "{"))
		if fields[0] == "proof" || fields[0] == "client_header" {
			secrets = append(secrets, fields[1:]...)
		}
	}
	return secrets
}

// reached is how the peer of a case can reach a server.
func (c *resolveCase) reached() via {
	switch {
	case c.Peer == "unix":
		return viaUnix
	case strings.HasPrefix(c.Peer, "127."):
		return viaTCP
	}
	return viaProxy
}

// Each case over a socket: the upstream behind reverse_proxy and the probe must
// both tell the client.
func TestCasesOverSockets(t *testing.T) {
	cases := loadResolveCases(t)
	upstream := runEcho(t)

	var sites []site
	index := make(map[site]int)
	siteOfCase := make([]int, len(cases))
	for i := range cases {
		c := &cases[i]
		s := site{server: serverOptions[c.Server], via: c.reached()}
		s.body = "edge_limit {\n" + c.clientText() + strings.Join(c.Options, "\n") + "\n}\n" +
			"edge_limit_probe /client-ip\nreverse_proxy " + upstream
		if _, ok := index[s]; !ok {
			index[s] = len(sites)
			sites = append(sites, s)
		}
		siteOfCase[i] = index[s]
	}
	endpoints := runSites(t, "", sites...)

	for i := range cases {
		c := &cases[i]
		t.Run(c.ID, func(t *testing.T) {
			e := endpoints[siteOfCase[i]]
			proxied := e.ask(t, c.Peer, "/", c.Lines...)
			if proxied.status != http.StatusOK {
				t.Fatalf("status %d, body %.200q", proxied.status, proxied.body)
			}
			checkUpstream(t, proxied.body, c.Want.XFF, c.Want.Headers, secretsOf(c.Client)...)

			probed := e.ask(t, c.Peer, "/client-ip", c.Lines...)
			var got struct {
				Resolved       *string
				Source, Reason string
			}
			if err := json.Unmarshal([]byte(probed.body), &got); err != nil {
				t.Fatalf("the probe answered %.200q: %v", probed.body, err)
			}
			if gotText, want := orUnresolved(got.Resolved), orUnresolved(c.Want.Client); gotText != want || got.Source != c.Want.Source || !c.reasonIs(got.Reason) {
				t.Errorf("the probe says %s by %s (%q), want %s by %s (%q): %s",
					gotText, got.Source, got.Reason, want, c.Want.Source, c.Want.Reason, c.Why)
			}
			if control := probed.header.Get("Cache-Control"); control != "no-store" {
				t.Errorf("the probe's Cache-Control is %q", control)
			}
		})
	}
}

func orUnresolved(address *string) string {
	if address == nil {
		return "unresolved"
	}
	return *address
}

// A process that can reach the socket chooses the name of its own end of it, and
// may choose one that looks like an address and a port.
func TestUnixPeerNamedLikeAnAddress(t *testing.T) {
	upstream := runEcho(t)
	sites := runSites(t, "",
		site{via: viaUnix, body: "edge_limit {\n" + clientBlock + "}\nreverse_proxy " + upstream},
		site{via: viaUnix, server: serverOptions["lax"], body: "edge_limit\nreverse_proxy " + upstream},
	)
	t.Chdir(t.TempDir())
	for _, test := range []struct {
		why, name string
		site      int
	}{
		{"a name is no address, so the peer has none", forgedIP + ":1", 0},
		{"nor is it that of a trusted proxy, so no chain is read", trustedPeer + ":1", 0},
		{"nor where Caddy's own trusted_proxies take the name for an address", trustedPeer + ":2", 1},
	} {
		conn, err := net.DialUnix("unix", &net.UnixAddr{Name: test.name, Net: "unix"}, &net.UnixAddr{Name: sites[test.site].address, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(patience))
		got := exchange(t, conn, requestText("GET /", "X-Forwarded-For: "+forgedIP))
		conn.Close()
		if head := parseHead(got.body); got.status != http.StatusOK || len(head.values("X-Forwarded-For")) != 0 {
			t.Errorf("%s (%s): status %d, the upstream received %q", test.why, test.name, got.status, head.values("X-Forwarded-For"))
		}
	}
}

// Whoever comes second, with whatever configuration, gets the first answer, and
// a name is charged once.
func TestHandlerRunsTwice(t *testing.T) {
	upstream := runEcho(t)
	global := "edge_limit {\n" + clientBlock + "limit twice_shared 2/h\nlimit twice_invoked 2/h\n}"
	first := "edge_limit twice_shared {\n" + clientBlock + "forward X-Real-IP\n}\n"
	second := "edge_limit twice_shared {\nclient connection\nforward X-Real-IP\n}\n"
	sites := runSites(t, global,
		site{body: "route {\n" + first + second + "edge_limit_probe /client-ip\nreverse_proxy " + upstream + "\n}"},
		site{named: "&(limited) {\nedge_limit twice_invoked\n}\n", body: "route {\ninvoke limited\ninvoke limited\nreverse_proxy " + upstream + "\n}"},
	)
	lines := []string{"X-Forwarded-For: " + forgedIP + ", " + visitor, "X-Real-IP: " + forgedIP}
	for i, e := range sites {
		name := []string{"two handlers in a route", "one handler invoked twice"}[i]
		headers := map[string][]string{}
		if i == 0 {
			headers["x-real-ip"] = []string{visitor}
		}
		for range 2 {
			got := e.ask(t, trustedPeer, "/", lines...)
			if got.status != http.StatusOK {
				t.Fatalf("%s: a request was charged more than once: status %d", name, got.status)
			}
			checkUpstream(t, got.body, []string{visitor}, headers)
		}
		if got := e.ask(t, trustedPeer, "/", lines...); got.status != http.StatusTooManyRequests {
			t.Errorf("%s: a third request of 2/h: status %d", name, got.status)
		}
	}
}

// An error route sees no more of what callers wrote than the main route, and the
// same client, also where its own configuration would find another.
func TestErrorRoutes(t *testing.T) {
	const secret = "s3cret-one-0123456789abcdef"
	upstream := runEcho(t)
	proof := "client {\ntrusted_proxies static " + trustedRanges + "\nproof X-Edge-Proof " + secret + "\n}\n"
	onError := "handle_errors {\nedge_limit\nreverse_proxy " + upstream + "\n}\n"
	sites := runSites(t, "edge_limit {\nclient connection\n}",
		site{body: "edge_limit {\n" + proof + "limit error_denied 1/h\n}\nreverse_proxy " + upstream + "\n" + onError},
		site{body: "edge_limit {\n" + proof + "}\nerror 418\n" + onError},
		site{body: "edge_limit {\n" + proof + "unresolved deny\n}\nreverse_proxy " + upstream + "\n" + onError},
		site{body: "edge_limit {\n" + proof + "unresolved deny\n}\nreverse_proxy " + upstream + "\n" +
			"handle_errors {\nedge_limit\nreverse_proxy " + upstream + " {\nreplace_status {err.status_code}\n}\n}"},
	)
	forged := []string{
		"X-Edge-Proof: nope", "X-Client-IP: " + forgedIP, "X-Real-IP: " + forgedIP, "X*Forwarded*For: " + forgedIP,
		"Connection: X-Forwarded-For",
	}
	for _, test := range []struct {
		why    string
		site   int
		peer   string
		lines  []string
		xff    []string
		status int
	}{
		{"the first request passes", 0, trustedPeer, []string{"X-Forwarded-For: " + forgedIP + ", " + visitor}, []string{visitor}, 200},
		{"the second is denied, and the page about it is told whom", 0, trustedPeer, []string{"X-Forwarded-For: " + forgedIP + ", " + visitor}, []string{visitor}, 200},
		{"an error of another handler, chain", 1, trustedPeer, []string{"X-Forwarded-For: " + forgedIP + ", " + visitor}, []string{visitor}, 200},
		{"an error of another handler, stranger", 1, strangePeer, []string{"X-Forwarded-For: " + forgedIP}, []string{strangePeer}, 200},
		{"an error of another handler, unresolved", 1, trustedPeer, []string{"X-Forwarded-For: " + forgedIP + ", unknown"}, []string{}, 200},
		{"an unresolved client that is denied: the status is the upstream's", 2, trustedPeer, []string{"X-Forwarded-For: " + forgedIP + ", unknown"}, []string{}, 200},
		{"the status of the denial, with the upstream's page", 3, trustedPeer, []string{"X-Forwarded-For: " + forgedIP + ", unknown"}, []string{}, 403},
	} {
		got := sites[test.site].ask(t, test.peer, "/", append(forged, test.lines...)...)
		t.Run(test.why, func(t *testing.T) {
			if got.status != test.status {
				t.Fatalf("status %d, want %d", got.status, test.status)
			}
			checkUpstream(t, got.body, test.xff, nil, secret, "X-Edge-Proof")
		})
	}
}

// A page about a denial is shown also to those who would be denied again: one
// request is denied once.
func TestErrorRouteOfUnresolvedDeny(t *testing.T) {
	upstream := runEcho(t)
	e := runSites(t, "edge_limit {\n"+clientBlock+"unresolved deny\n}",
		site{body: "edge_limit\nrespond passed\nhandle_errors {\nedge_limit\nreverse_proxy " + upstream + "\n}"},
	)[0]
	got := e.ask(t, trustedPeer, "/", "X-Forwarded-For: "+forgedIP+", unknown")
	if got.status != http.StatusOK { // of the upstream
		t.Fatalf("the error route did not get to the upstream: status %d, %q", got.status, got.body)
	}
	checkUpstream(t, got.body, []string{}, nil)
}

// A malformed Host never reaches the main route, so the error route is the first
// to see the request: before Caddy has dropped look-alikes.
func TestMalformedHost(t *testing.T) {
	const secret = "s3cret-one-0123456789abcdef"
	upstream := runEcho(t)
	e := runSites(t, "",
		site{body: "handle_errors {\nedge_limit {\nclient {\ntrusted_proxies static " + trustedRanges + "\nproof X-Edge-Proof " + secret + "\n}\n}\n" +
			"reverse_proxy " + upstream + "\n}\nrespond nothing"},
	)[0]
	forged := []string{
		"X_Forwarded_For: " + forgedIP, "X.Real.IP: " + forgedIP, "X-Real_IP: " + forgedIP, "X_Edge_Proof: " + secret,
		"X_Client_IP: " + forgedIP, "True-Client-IP: " + forgedIP,
	}
	for _, test := range []struct {
		why, peer string
		lines     []string
		xff       []string
	}{
		{"a chain", trustedPeer, []string{"X-Forwarded-For: " + forgedIP + ", " + visitor}, []string{visitor}},
		{"no chain", trustedPeer, nil, []string{}},
		{"a stranger", strangePeer, []string{"X-Forwarded-For: " + forgedIP}, []string{strangePeer}},
		{"a proof", strangePeer, []string{"X-Edge-Proof: " + secret, "X-Client-IP: " + visitor}, []string{visitor}},
		{"a wrong proof", strangePeer, []string{"X-Edge-Proof: nope", "X-Client-IP: " + forgedIP}, []string{strangePeer}},
	} {
		t.Run(test.why, func(t *testing.T) {
			conn := e.dial(t, test.peer)
			text := "GET / HTTP/1.1\r\nHost: ...\r\n" + strings.Join(append(forged, test.lines...), "\r\n") + "\r\n\r\n"
			got := exchange(t, conn, text)
			if got.status != http.StatusOK {
				t.Fatalf("status %d", got.status)
			}
			if host := parseHead(got.body).values("Host"); !slices.Equal(host, []string{"..."}) {
				t.Errorf("the upstream received Host %q: is this still the case that is meant?", host)
			}
			checkUpstream(t, got.body, test.xff, nil, secret, "X-Edge-Proof")
		})
	}
}

// A page that includes others by requests of Caddy's own is one request of its
// visitor.
func TestVirtualRequests(t *testing.T) {
	directory := t.TempDir()
	page := `{{httpInclude "/part"}}{{httpInclude "/part"}} for {{.ClientIP}}`
	if err := os.WriteFile(filepath.Join(directory, "index.html"), []byte(page), 0o600); err != nil {
		t.Fatal(err)
	}
	e := runSites(t, "",
		site{body: "edge_limit {\n" + clientBlock + "limit virtual_client 2/h\nceiling virtual_all 3/h\n}\n" +
			"root " + directory + "\nrespond /part \"part.\"\ntemplates\nfile_server"},
	)[0]
	for i, test := range []struct {
		why, client string
		status      int
	}{
		{"one of two", visitor, http.StatusOK},
		{"two of two: the parts were not charged", visitor, http.StatusOK},
		{"the visitor's budget is used up", visitor, http.StatusTooManyRequests},
		{"another visitor's is not, and it is the third that the ceiling counts", otherVisitor, http.StatusOK},
		{"four pages are above the ceiling of three", otherVisitor, http.StatusServiceUnavailable},
	} {
		got := e.ask(t, trustedPeer, "/", "X-Forwarded-For: "+forgedIP+", "+test.client)
		if got.status != test.status {
			t.Errorf("page %d: %s: status %d, want %d: %s", i+1, test.why, got.status, test.status, got.body)
		}
		if want := "part.part. for " + test.client; got.status == http.StatusOK && got.body != want {
			t.Errorf("page %d: %q, want %q", i+1, got.body, want)
		}
	}
}

// Early data proves neither the sender's address nor that it is not replayed. It
// is refused before anything is remembered, and so sent again.
func TestEarlyData(t *testing.T) {
	h := newTestHandler(t, clientBlock+"limit early_data 1/h")
	early := func(ctx context.Context) *http.Request {
		r := newTestRequest(t, nil, "127.0.0.2:40000", requestText("GET /", "X-Forwarded-For: "+forgedIP+", "+visitor, "X-Real-IP: "+forgedIP))
		r.TLS = &tls.ConnectionState{HandshakeComplete: false}
		if ctx != nil {
			r = r.WithContext(context.WithValue(r.Context(), caddyhttp.ErrorCtxKey, caddyhttp.Error(http.StatusTooEarly, nil)))
		}
		return r
	}

	for range 3 {
		r := early(nil)
		before := varsOf(r)[caddyhttp.ClientIPVarKey]
		err := h.ServeHTTP(httptest.NewRecorder(), r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
			t.Error("early data was passed on")
			return nil
		}))
		if handlerError, ok := err.(caddyhttp.HandlerError); !ok || handlerError.StatusCode != http.StatusTooEarly {
			t.Errorf("early data: error %v, want status 425", err)
		}
		if stateOf(varsOf(r)) != nil || varsOf(r)[caddyhttp.ClientIPVarKey] != before {
			t.Error("early data: something was remembered")
		}
	}

	t.Run("error route", func(t *testing.T) {
		r := early(t.Context())
		passed := false
		err := h.ServeHTTP(httptest.NewRecorder(), r, caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
			passed = true
			if values, marked := r.Header["X-Forwarded-For"]; !marked || values != nil || r.Header.Get("X-Real-IP") != "" {
				t.Errorf("the error route sees %v", r.Header)
			}
			return nil
		}))
		if err != nil || !passed {
			t.Errorf("an error route refuses early data once more: %v", err)
		}
		if stateOf(varsOf(r)) != nil {
			t.Error("something was remembered")
		}
	})

	t.Run("sent again", func(t *testing.T) {
		for i, want := range []int{http.StatusOK, http.StatusTooManyRequests} {
			r := early(nil)
			r.TLS.HandshakeComplete = true
			if got := serveTest(t, h, r, nil); got != want {
				t.Errorf("request %d after the handshake: status %d, want %d: early data must not be charged, and the rest must", i+1, got, want)
			}
		}
	})
}

// A handshake is one request, and nothing of the connection after it.
func TestWebSocket(t *testing.T) {
	const key, magic = "dGhlIHNhbXBsZSBub25jZQ==", "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
	heads := make(chan http.Header, 4)
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		heads <- r.Header.Clone()
		accept := sha1.Sum([]byte(r.Header.Get("Sec-WebSocket-Key") + magic))
		conn, stream, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		fmt.Fprintf(stream, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: %s\r\n\r\n",
			base64.StdEncoding.EncodeToString(accept[:]))
		stream.Flush()
		_, _ = io.Copy(conn, stream) // an echo, until the other side closes
	}))
	t.Cleanup(upstream.Close)
	e := runSites(t, "",
		site{body: "edge_limit {\n" + clientBlock + "limit websocket 2/h\n}\nreverse_proxy " + upstream.Listener.Addr().String()},
	)[0]
	handshake := requestText("GET /chat", "X-Forwarded-For: "+forgedIP+", "+visitor, "Connection: Upgrade, X-Forwarded-For",
		"Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: "+key)

	for range 2 {
		conn := e.dial(t, trustedPeer)
		if _, err := io.WriteString(conn, handshake); err != nil {
			t.Fatal(err)
		}
		r := bufio.NewReader(conn)
		response, err := http.ReadResponse(r, nil)
		if err != nil || response.StatusCode != http.StatusSwitchingProtocols {
			t.Fatalf("no upgrade: %v %v", response, err)
		}
		if accept := response.Header.Get("Sec-WebSocket-Accept"); accept != "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" {
			t.Errorf("Sec-WebSocket-Accept %q", accept)
		}
		for _, message := range []string{"\x81\x05hello", "\x81\x03you"} {
			echo := make([]byte, len(message))
			if _, err := io.WriteString(conn, message); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(r, echo); err != nil || string(echo) != message {
				t.Fatalf("after the upgrade: %q came back as %q: %v", message, echo, err)
			}
		}
		conn.Close()
		head := <-heads
		if got := head.Values("X-Forwarded-For"); !slices.Equal(got, []string{visitor}) {
			t.Errorf("the upstream received X-Forwarded-For %q", got)
		}
		if got := head.Values("Connection"); !slices.Equal(got, []string{"Upgrade"}) {
			t.Errorf("the upstream received Connection %q", got)
		}
	}
	if got := exchange(t, e.dial(t, trustedPeer), handshake); got.status != http.StatusTooManyRequests {
		t.Errorf("a third handshake of 2/h: status %d", got.status)
	}
}

// One client is one client over HTTP/2 as over HTTP/1.1, and a denied stream
// leaves the connection to the others.
func TestHTTP2(t *testing.T) {
	upstream := runEcho(t)
	e := runSites(t, "",
		site{server: "protocols h1 h2c", body: "edge_limit {\n" + clientBlock + "limit http2 2/h\n}\nreverse_proxy " + upstream},
	)[0]
	client, dials := h2cClient(t, e, trustedPeer)
	overH2 := func(of string, body io.Reader) answer {
		t.Helper()
		method := http.MethodGet
		if body != nil {
			method = http.MethodPost
		}
		return sendHTTP2(t, e, method, body, http.Header{
			"X-Forwarded-For": {forgedIP, forgedIP + ", " + of}, "X-Real-Ip": {forgedIP}, "X*forwarded*for": {forgedIP},
		}, client)
	}

	first := overH2(visitor, nil)
	checkUpstream(t, first.body, []string{visitor}, nil)
	second := e.ask(t, trustedPeer, "/", "X-Forwarded-For: "+visitor)
	if first.status != http.StatusOK || second.status != http.StatusOK {
		t.Errorf("two requests of 2/h: status %d over HTTP/2, %d over HTTP/1.1", first.status, second.status)
	}
	if got := overH2(visitor, nil); got.status != http.StatusTooManyRequests {
		t.Errorf("a third request of 2/h: status %d", got.status)
	}

	body, unsent := io.Pipe() // nothing is ever written to it
	defer unsent.Close()
	denied := overH2(visitor, body)
	if denied.status != http.StatusTooManyRequests || denied.header.Get("Retry-After") == "" {
		t.Errorf("a body that is not sent: status %d, header %v", denied.status, denied.header)
	}
	if closing := denied.header.Get("Connection"); closing != "" {
		t.Errorf("Connection: %s would end the connection for all streams", closing)
	}
	if got := overH2(otherVisitor, nil); got.status != http.StatusOK {
		t.Errorf("another client over the same connection: status %d", got.status)
	}
	if *dials != 1 {
		t.Errorf("%d connections were made, want 1: a denial ended one", *dials)
	}
}

// h2cClient returns a client that speaks HTTP/2 without TLS from that peer, and
// how many connections it made.
func h2cClient(t *testing.T, e endpoint, peer string) (*http.Client, *int) {
	t.Helper()
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	dials := new(int)
	transport := &http.Transport{
		Protocols: protocols,
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			*dials++
			return (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(peer)}, Timeout: patience}).Dial("tcp", e.address)
		},
	}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: patience}, dials
}

func sendHTTP2(t *testing.T, e endpoint, method string, body io.Reader, header http.Header, client *http.Client) answer {
	t.Helper()
	r, err := http.NewRequest(method, "http://"+e.address+"/", body)
	if err != nil {
		t.Fatal(err)
	}
	r.Host, r.Header = "test.local", header
	response, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if response.ProtoMajor != 2 {
		t.Fatalf("this is %s", response.Proto)
	}
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{response.StatusCode, response.Header, string(text), response.Close}
}

// The body that a placeholder has read into memory is the body that is sent on:
// what is bound to the request stays bound to it.
func TestRequestBodyPlaceholder(t *testing.T) {
	upstream := runRecorder(t)
	rest := "request_header X-Body {http.request.body}\nreverse_proxy " + upstream
	sites := runSites(t, "",
		site{body: "edge_limit {\n" + clientBlock + "}\n" + rest},
		site{body: rest},
	)
	for _, test := range []struct{ why, text string }{
		{"a length", requestText("POST /", "Content-Length: 5") + "hello"},
		{"chunks", requestText("POST /", "Transfer-Encoding: chunked") + "5\r\nhello\r\n0\r\n\r\n"},
		{"chunks and trailers", requestText("POST /", "Transfer-Encoding: chunked", "Trailer: X-Sum") + "5\r\nhello\r\n0\r\nX-Sum: 1\r\n\r\n"},
		{"no body", requestText("GET /")},
	} {
		with := parseReceived(t, exchange(t, sites[0].dial(t, strangePeer), test.text))
		without := parseReceived(t, exchange(t, sites[1].dial(t, strangePeer), test.text))
		if with.Body != without.Body || with.Header.Get("X-Body") != without.Header.Get("X-Body") {
			t.Errorf("%s: the upstream received body %q and X-Body %q; without us %q and %q",
				test.why, with.Body, with.Header.Get("X-Body"), without.Body, without.Header.Get("X-Body"))
		}
		if test.why == "a length" && (with.Body != "hello" || with.Header.Get("X-Body") != "hello") {
			t.Errorf("%s: body %q, X-Body %q", test.why, with.Body, with.Header.Get("X-Body"))
		}
	}
}

// forward off resolves and limits, and leaves to Caddy what the upstream is
// told: all but the proof's headers arrives as it does without us.
func TestForwardOff(t *testing.T) {
	const secret = "s3cret-one-0123456789abcdef"
	upstream := runEcho(t)
	server := "trusted_proxies static " + trustedRanges
	proof := "proof X-Edge-Proof " + secret + "\n"
	sites := runSites(t, "",
		site{server: server, body: "edge_limit {\nclient {\ntrusted_proxies static " + trustedRanges + "\n" + proof + "}\nforward off\n}\n" +
			"respond /who \"{client_ip} {http.edge_limit.client_ip} {remote_host}\"\nreverse_proxy " + upstream},
		site{server: server, body: "reverse_proxy " + upstream},
	)
	for _, test := range []struct {
		why, peer string
		lines     []string
		who       string
	}{
		{
			"a stranger", strangePeer,
			[]string{"X-Forwarded-For: " + forgedIP, "X-Real-IP: " + forgedIP, "X-Forwarded-Proto: https", "X_Real_IP: " + forgedIP},
			strangePeer + " " + strangePeer + " " + strangePeer,
		},
		{
			"a trusted peer", trustedPeer,
			[]string{"X-Forwarded-For: " + forgedIP + ", " + visitor, "CF-Connecting-IP: " + visitor, "X-Forwarded-Proto: https", "Forwarded: for=1.2.3.4"},
			visitor + " " + visitor + " " + trustedPeer,
		},
		{
			"hop-by-hop headers", trustedPeer,
			[]string{"X-Forwarded-For: " + visitor, "X-Hop: 1", "Connection: X-Hop, X-Real-IP", "X-Real-IP: " + forgedIP},
			visitor + " " + visitor + " " + trustedPeer,
		},
		{
			"nobody known", trustedPeer,
			[]string{"X-Forwarded-For: " + forgedIP + ", unknown"},
			"unresolved unresolved " + trustedPeer,
		},
	} {
		with, without := sites[0].ask(t, test.peer, "/", test.lines...), sites[1].ask(t, test.peer, "/", test.lines...)
		if with.body != without.body {
			t.Errorf("%s: the upstream received\n%s\nand without us\n%s", test.why, with.body, without.body)
		}
		if got := sites[0].ask(t, test.peer, "/who", test.lines...).body; got != test.who {
			t.Errorf("%s: client_ip and remote_host are %q, want %q", test.why, got, test.who)
		}
	}

	// the proof's headers are nobody else's business
	with := sites[0].ask(t, strangePeer, "/", "X-Edge-Proof: "+secret, "X-Client-IP: "+visitor, "X*Edge*Proof: "+secret, "X-Kept: 1")
	if without := sites[1].ask(t, strangePeer, "/", "X-Kept: 1"); with.body != without.body {
		t.Errorf("a proof: the upstream received\n%s\nwant\n%s", with.body, without.body)
	}
	if got := sites[0].ask(t, strangePeer, "/who", "X-Edge-Proof: "+secret, "X-Client-IP: "+visitor).body; got != visitor+" "+visitor+" "+strangePeer {
		t.Errorf("a proof: client_ip and remote_host are %q", got)
	}
}

// In front of the upstream, remote_ip is the peer for the matchers of limits, and
// the client behind the handler; client_ip is the client for both.
func TestMatchers(t *testing.T) {
	limited := func(name, matcher string) site {
		return site{body: "edge_limit {\n" + clientBlock + "limit " + name + " 1/h {\nmatch {\n" + matcher + "\n}\n}\n}\nrespond passed"}
	}
	const behind = "@behind remote_ip " + visitor + "\nrespond @behind client\nrespond peer"
	sites := runSites(t, "",
		limited("match_remote_peer", "remote_ip "+trustedPeer),
		limited("match_remote_client", "remote_ip "+visitor),
		limited("match_client_client", "client_ip "+visitor),
		limited("match_client_peer", "client_ip "+trustedPeer),
		site{body: "@peer remote_ip " + trustedPeer + "\nedge_limit @peer {\n" + clientBlock + "limit match_directive_peer 1/h\n}\nrespond passed"},
		site{body: "@client client_ip " + visitor + "\nedge_limit @client {\n" + clientBlock + "limit match_directive_client 1/h\n}\nrespond passed"},
		site{body: "@client client_ip " + otherVisitor + "\nedge_limit @client {\n" + clientBlock + "limit match_directive_other 1/h\n}\nrespond passed"},
		site{body: "edge_limit {\n" + clientBlock + "}\n" + behind},
		site{body: "edge_limit {\n" + clientBlock + "forward off\n}\n" + behind},
		site{body: "route {\nedge_limit {\n" + clientBlock + "}\nedge_limit {\nlimit match_second_handler 1/h {\nmatch {\nremote_ip " + trustedPeer + "\n}\n}\n}\nrespond passed\n}"},
	)
	for i, test := range []struct {
		why     string
		matches bool
	}{
		{"remote_ip in match is the peer", true},
		{"remote_ip in match is not the client", false},
		{"client_ip in match is the client", true},
		{"client_ip in match is not the peer", false},
		{"remote_ip as the directive's matcher is the peer", true},
		{"client_ip as the directive's matcher is the client", true},
		{"client_ip as the directive's matcher is nobody else", false},
	} {
		want := http.StatusOK
		if test.matches {
			want = http.StatusTooManyRequests
		}
		for range 2 {
			got := sites[i].ask(t, trustedPeer, "/", "X-Forwarded-For: "+forgedIP+", "+visitor)
			if got.status != http.StatusOK && got.status != want {
				t.Errorf("%s: status %d", test.why, got.status)
			}
		}
		if got := sites[i].ask(t, trustedPeer, "/", "X-Forwarded-For: "+forgedIP+", "+visitor); got.status != want {
			t.Errorf("%s: status %d, want %d", test.why, got.status, want)
		}
	}
	for range 2 {
		sites[9].ask(t, trustedPeer, "/", "X-Forwarded-For: "+visitor)
	}
	if got := sites[9].ask(t, trustedPeer, "/", "X-Forwarded-For: "+visitor); got.status != http.StatusTooManyRequests {
		t.Errorf("remote_ip in match of a second handler is not the peer: status %d", got.status)
	}
	for i, want := range []string{"client", "peer"} {
		if got := sites[7+i].ask(t, trustedPeer, "/", "X-Forwarded-For: "+visitor); got.body != want {
			t.Errorf("behind the handler, remote_ip matched the %s, want the %s (forward off: %t)", got.body, want, i == 1)
		}
	}
}

func TestPlaceholders(t *testing.T) {
	const text = "{http.edge_limit.client_ip}|{http.edge_limit.client}|{http.edge_limit.source}|{http.edge_limit.reason}|{client_ip}"
	const exceeded = "{http.edge_limit.exceeded.name}|{http.edge_limit.exceeded.retry_after}"
	sites := runSites(t, "edge_limit {\nipv4_prefix 24\n}",
		site{body: "edge_limit {\n" + clientBlock + "}\nrespond \"" + text + "|" + exceeded + "\""},
		site{body: "edge_limit {\n" + clientBlock + "limit placeholder_limit 1/h {\nmatch /limit\n}\nceiling placeholder_ceiling 1/h {\nmatch /ceiling\n}\n}\nrespond passed\n" +
			"handle_errors {\nrespond \"" + exceeded + "|{err.status_code}|{http.edge_limit.client_ip}\"\n}"},
		site{body: "edge_limit {\n" + clientBlock + "unresolved deny\n}\nrespond passed\nhandle_errors {\nrespond \"" + exceeded + "|{err.status_code}|{http.edge_limit.client_ip}\"\n}"},
	)
	for _, test := range []struct{ why, peer, chain, want string }{
		{"IPv4", trustedPeer, forgedIP + ", " + visitor, "203.0.113.7|203.0.113.0/24|trusted_proxies||203.0.113.7||"},
		{"IPv6", trustedPeer, "2001:db8:0:1::7", "2001:db8:0:1::7|2001:db8:0:1::/64|trusted_proxies||2001:db8:0:1::7||"},
		{"NAT64", trustedPeer, "64:ff9b::203.0.113.7", "64:ff9b::cb00:7107|203.0.113.0/24|trusted_proxies||64:ff9b::cb00:7107||"},
		{"connection", strangePeer, forgedIP, "127.0.1.9|127.0.1.0/24|connection|untrusted_header|127.0.1.9||"},
		{"unresolved", trustedPeer, forgedIP + ", unknown", "unresolved|unresolved|unresolved|malformed|unresolved||"},
	} {
		if got := sites[0].ask(t, test.peer, "/", "X-Forwarded-For: "+test.chain).body; got != test.want {
			t.Errorf("%s: %s, want %s", test.why, got, test.want)
		}
	}
	for _, path := range []string{"limit", "ceiling"} {
		sites[1].ask(t, trustedPeer, "/"+path, "X-Forwarded-For: "+visitor)
		got := sites[1].ask(t, trustedPeer, "/"+path, "X-Forwarded-For: "+visitor)
		fields := strings.Split(got.body, "|")
		if len(fields) != 4 {
			t.Fatalf("%s: %q", path, got.body)
		}
		seconds, err := strconv.Atoi(fields[1])
		if fields[0] != "placeholder_"+path || err != nil || seconds < 1 || seconds > 2*3600 || fields[3] != visitor {
			t.Errorf("%s: %q", path, got.body)
		}
		if path == "limit" && got.header.Get("Retry-After") != fields[1] {
			t.Errorf("retry_after is %s, and Retry-After %s", fields[1], got.header.Get("Retry-After"))
		}
	}
	if got := sites[2].ask(t, trustedPeer, "/").body; got != "unresolved||403|unresolved" {
		t.Errorf("unresolved deny: %q", got)
	}
}

// The access log keeps the peer and tells the client; the recommended header of a
// proof is redacted in it.
func TestAccessLog(t *testing.T) {
	const secret = "s3cret-one-0123456789abcdef"
	file := filepath.Join(t.TempDir(), "access.log")
	upstream := runEcho(t)
	e := runSites(t, "",
		site{body: "log {\noutput file " + file + "\nformat json\n}\n" +
			"edge_limit {\nclient {\ntrusted_proxies static " + trustedRanges + "\nproof Proxy-Authorization " + secret + "\n}\n}\n" +
			"reverse_proxy " + upstream},
	)[0]
	tests := []struct {
		why, peer string
		line      string
		clientIP  string
	}{
		{"a chain", trustedPeer, "X-Forwarded-For: " + forgedIP + ", " + visitor, visitor},
		{"a stranger", strangePeer, "X-Forwarded-For: " + forgedIP, strangePeer},
		{"nobody", trustedPeer, "X-Forwarded-For: " + forgedIP + ", unknown", "unresolved"},
		{"a proof", strangePeer, "Proxy-Authorization: " + secret + "\r\nX-Client-IP: " + visitor, visitor},
	}
	for _, test := range tests {
		e.ask(t, test.peer, "/", test.line)
	}
	stopCaddy(t) // no request is under way any more
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(text, []byte(secret)) {
		t.Errorf("the log holds the secret:\n%s", text)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	if len(lines) != len(tests) {
		t.Fatalf("%d lines for %d requests:\n%s", len(lines), len(tests), text)
	}
	for i, test := range tests {
		var entry struct {
			Request struct {
				RemoteIP string `json:"remote_ip"`
				ClientIP string `json:"client_ip"`
			}
		}
		if err := json.Unmarshal([]byte(lines[i]), &entry); err != nil {
			t.Fatal(err)
		}
		if entry.Request.RemoteIP != test.peer || entry.Request.ClientIP != test.clientIP {
			t.Errorf("%s: remote_ip %s, client_ip %s; want %s and %s",
				test.why, entry.Request.RemoteIP, entry.Request.ClientIP, test.peer, test.clientIP)
		}
	}
}

// A denial is answered while the body has not been sent, and on HTTP/1.1 the
// connection is closed then, and only then.
func TestDenied(t *testing.T) {
	limit := func(name string) string {
		return "edge_limit {\n" + clientBlock + "limit " + name + " 1/h\n}\nrespond passed\n"
	}
	sites := runSites(t, "",
		site{body: limit("denied_plain")},
		site{body: limit("denied_handled") + "handle_errors {\nrespond \"sorry: {err.status_code}\" 429\n}"},
	)
	for i, e := range sites {
		name := []string{"without error routes", "with handle_errors"}[i]
		chain := "X-Forwarded-For: " + forgedIP + ", " + visitor
		if got := e.ask(t, trustedPeer, "/", chain); got.status != http.StatusOK {
			t.Fatalf("%s: the first request: status %d", name, got.status)
		}
		for _, test := range []struct {
			why    string
			text   string
			unsent bool
		}{
			{"no body", requestText("GET /", chain), false},
			{"an empty body", requestText("POST /", chain, "Content-Length: 0"), false},
			{"1 KB not sent", requestText("POST /", chain, "Content-Length: 1024"), true},
			{"1 KB not sent, asked for", requestText("POST /", chain, "Content-Length: 1024", "Expect: 100-continue"), true},
			{"300 KB not sent", requestText("POST /", chain, "Content-Length: 300000"), true},
			{"300 KB not sent, asked for", requestText("POST /", chain, "Content-Length: 300000", "Expect: 100-continue"), true},
			{"300 KB begun", requestText("POST /", chain, "Content-Length: 300000") + strings.Repeat("x", 2000), true},
			{"chunks not sent", requestText("POST /", chain, "Transfer-Encoding: chunked"), true},
			{"chunks begun", requestText("POST /", chain, "Transfer-Encoding: chunked") + "5\r\nhello\r\n", true},
		} {
			conn := e.dial(t, trustedPeer)
			got := exchange(t, conn, test.text)
			if got.status != http.StatusTooManyRequests {
				t.Errorf("%s, %s: status %d", name, test.why, got.status)
			}
			if seconds, err := strconv.Atoi(got.header.Get("Retry-After")); err != nil || seconds < 1 || seconds > 3600 {
				t.Errorf("%s, %s: Retry-After %q", name, test.why, got.header.Get("Retry-After"))
			}
			if want := []string{"", "sorry: 429"}[i]; got.body != want {
				t.Errorf("%s, %s: body %q, want %q", name, test.why, got.body, want)
			}
			if kind, want := got.header.Get("Content-Type"), []string{"", "text/plain; charset=utf-8"}[i]; kind != want {
				t.Errorf("%s, %s: Content-Type %q, want %q", name, test.why, kind, want)
			}
			if got.closing != test.unsent {
				t.Errorf("%s, %s: Connection: close is %t, want %t", name, test.why, got.closing, test.unsent)
			}
			if !test.unsent {
				exchange(t, conn, requestText("GET /", chain)) // the connection can be used again
			}
			conn.Close()
		}
	}
}
