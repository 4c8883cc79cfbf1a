package edgelimit

import (
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/textproto"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// sent is what stands behind the handler: a copy of the request's outside.
type sent struct {
	header     http.Header
	remoteAddr string
	trusted    any // Caddy's verdict about the peer
	clientIP   any // Caddy's client_ip
	same       bool
}

// sendThrough runs a request through the handler.
func sendThrough(t testing.TB, h *Handler, r *http.Request) (got sent) {
	t.Helper()
	passed := false
	status := serveTest(t, h, r, func(inner *http.Request) {
		passed = true
		vars := varsOf(inner)
		got = sent{inner.Header.Clone(), inner.RemoteAddr, vars[caddyhttp.TrustedProxyVarKey], vars[caddyhttp.ClientIPVarKey], inner == r}
	})
	if !passed {
		t.Fatalf("the request did not pass: status %d", status)
	}
	return got
}

// equalHeaders compares headers; an absent one and one without values differ.
func equalHeaders(a, b http.Header) bool {
	return maps.EqualFunc(a, b, func(a, b []string) bool {
		return (a == nil) == (b == nil) && slices.Equal(a, b)
	})
}

// What is left of the header behind the handler, exactly.
func TestRemove(t *testing.T) {
	const secret = "s3cret-one-0123456789abcdef"
	plain := newTestHandler(t, clientBlock)
	proof := newTestHandler(t, "client {\ntrusted_proxies static "+trustedRanges+"\nproof X-Edge-Proof "+secret+" {\nclient_header X-Visitor\n}\n}")
	chain := newTestHandler(t, "client {\ntrusted_proxies static "+trustedRanges+"\nheader X-Chain\n}\nstrip X-Tenant-IP x-very-long-name-"+strings.Repeat("a", 80))
	told := newTestHandler(t, clientBlock+"forward X-Real-IP X-Own-Name")
	off := newTestHandler(t, "client {\ntrusted_proxies static "+trustedRanges+"\nproof X-Edge-Proof "+secret+"\n}\nforward off")

	almost := "X-Very-Long-Name-" + strings.Repeat("a", 79)
	for _, test := range []struct {
		why   string
		h     *Handler
		peer  string
		lines []string
		want  http.Header
	}{
		{"ordinary headers stay as they are", plain, strangePeer,
			[]string{"Accept: a", "accept: b", "Cookie: x=1", "Authorization: Basic eA==", "X-Request-Id: 1", "Via: 1.0 proxy", "Host-Name: x"},
			http.Header{"Accept": {"a", "b"}, "Cookie": {"x=1"}, "Authorization": {"Basic eA=="}, "X-Request-Id": {"1"}, "Via": {"1.0 proxy"}, "Host-Name": {"x"}}},
		{"the chain goes when it was read", plain, trustedPeer, []string{"X-Forwarded-For: " + visitor}, http.Header{}},
		{"and when it was not", plain, strangePeer, []string{"X-Forwarded-For: " + forgedIP}, http.Header{}},
		{"where nobody is known, a header without values says so to reverse_proxy", plain, trustedPeer, []string{"X-Forwarded-For: unknown"}, http.Header{"X-Forwarded-For": nil}},
		{"a trusted peer's scheme and host stay", plain, trustedPeer,
			[]string{"X-Forwarded-For: " + visitor, "X-Forwarded-Proto: https", "X-Forwarded-Host: shop.example", "X-Forwarded-Port: 443"},
			http.Header{"X-Forwarded-Proto": {"https"}, "X-Forwarded-Host": {"shop.example"}, "X-Forwarded-Port": {"443"}}},
		{"a stranger's go, with their look-alikes", plain, strangePeer,
			[]string{"X-Forwarded-Proto: https", "X-Forwarded-Host: evil.example", "X_Forwarded_Proto: https", "X.Forwarded.Host: evil.example", "X*forwarded-proto: https"},
			http.Header{}},
		{"without a proof both headers go", proof, strangePeer, []string{"X-Visitor: " + forgedIP, "Accept: a"}, http.Header{"Accept": {"a"}}},
		{"with a wrong one too", proof, strangePeer, []string{"X-Edge-Proof: nope", "X-Visitor: " + forgedIP}, http.Header{}},
		{"with a right one too", proof, strangePeer, []string{"X-Edge-Proof: " + secret, "X-Visitor: " + visitor}, http.Header{}},
		{"and the proof's look-alikes", proof, strangePeer, []string{"X_Edge_Proof: " + secret, "X.Visitor: " + forgedIP, "x*edge*proof: " + secret}, http.Header{}},
		{"a proof from a stranger does not vouch for scheme and host", proof, strangePeer,
			[]string{"X-Edge-Proof: " + secret, "X-Visitor: " + visitor, "X-Forwarded-Proto: https", "X-Forwarded-Host: evil.example"}, http.Header{}},
		{"the configured header goes, with its look-alikes", chain, trustedPeer, []string{"X-Chain: " + visitor, "X_Chain: " + forgedIP}, http.Header{}},
		{"what strip names goes, with its look-alikes", chain, strangePeer,
			[]string{"X-Tenant-IP: " + forgedIP, "X.Tenant.IP: " + forgedIP, almost + "a: 1", almost + ": 1"},
			http.Header{http.CanonicalHeaderKey(almost): {"1"}}},
		{"what forward names holds the client", told, trustedPeer,
			[]string{"X-Forwarded-For: " + visitor, "X-Real-IP: " + forgedIP, "X-Own-Name: " + forgedIP},
			http.Header{"X-Real-Ip": {visitor}, "X-Own-Name": {visitor}}},
		{"or nobody, and not what the caller wrote", told, trustedPeer,
			[]string{"X-Forwarded-For: unknown", "X-Real-IP: " + forgedIP, "X-Own-Name: " + forgedIP},
			http.Header{"X-Forwarded-For": nil}},
		{"its look-alikes go", told, trustedPeer,
			[]string{"X-Forwarded-For: " + visitor, "X_Real_IP: " + forgedIP, "X_Own_Name: " + forgedIP, "Connection: X-Own-Name"},
			http.Header{"X-Real-Ip": {visitor}, "X-Own-Name": {visitor}}},
		{"forward off: all but the proof's stay", off, strangePeer,
			[]string{"X-Forwarded-For: " + forgedIP, "X-Real-IP: " + forgedIP, "X-Forwarded-Proto: https", "X-Edge-Proof: nope", "X-Client-IP: " + forgedIP, "X_Edge_Proof: " + secret, "Connection: X-Real-IP, X-Edge-Proof"},
			http.Header{"X-Forwarded-For": {forgedIP}, "X-Real-Ip": {forgedIP}, "X-Forwarded-Proto": {"https"}, "Connection": {"X-Real-IP"}}},
	} {
		got := sendThrough(t, test.h, newTestRequest(t, nil, remoteAddrOf(test.peer), requestText("GET /", test.lines...)))
		if !equalHeaders(got.header, test.want) {
			t.Errorf("%s:\n got %q\nwant %q", test.why, got.header, test.want)
		}
		if !got.same {
			t.Errorf("%s: it is not the same request any more", test.why)
		}
	}
}

// Every identity header goes under every name that CGI would take for it, and
// names beside them stay.
func TestRemoveLookAlikes(t *testing.T) {
	h := newTestHandler(t, clientBlock)
	const signs = "!#$%&'*+-.^_`|~" // what a name can hold beside letters and digits
	for _, name := range wantIdentity {
		var alike []string
		for _, sign := range strings.Split(signs, "") {
			alike = append(alike, strings.ReplaceAll(name, "-", sign), strings.Replace(name, "-", sign, 1), strings.ToUpper(strings.ReplaceAll(name, "-", sign)))
		}
		alike = append(alike, strings.ToLower(name), strings.ToUpper(name))
		for _, peer := range []string{trustedPeer, strangePeer} {
			for _, spelling := range alike {
				r := newTestRequest(t, nil, remoteAddrOf(peer), requestText("GET /", spelling+": "+forgedIP, spelling+": "+forgedIP))
				if got := sendThrough(t, h, r); len(got.header["X-Forwarded-For"]) > 0 || len(got.header) > 1 || len(got.header) == 1 && got.header["X-Forwarded-For"] != nil {
					t.Errorf("%s from %s: %q is left", spelling, peer, got.header)
				}
			}
			for _, other := range []string{name + "-", "-" + name, name + "-Test", "Y-" + name, name[1:], name[:len(name)-1], "0" + name[1:]} {
				if slices.ContainsFunc(wantIdentity, func(identity string) bool { return sameForCGI(identity, other) }) {
					continue // another of them
				}
				r := newTestRequest(t, nil, remoteAddrOf(peer), requestText("GET /", other+": kept"))
				if got := sendThrough(t, h, r); !slices.Equal(got.header.Values(other), []string{"kept"}) {
					t.Errorf("%s from %s: removed", other, peer)
				}
			}
		}
	}
}

// tokensOf lists what Connection lines name, in order.
func tokensOf(lines []string) (tokens []string) {
	for _, line := range lines {
		for token := range strings.SplitSeq(line, ",") {
			if token = textproto.TrimString(token); token != "" {
				tokens = append(tokens, token)
			}
		}
	}
	return tokens
}

func TestConnection(t *testing.T) {
	h := newTestHandler(t, clientBlock+"strip X-Tenant-IP\nforward X-Own-Name")
	for _, test := range []struct {
		why  string
		in   []string
		want []string // tokens; nil: the header is gone
	}{
		{"nothing to do", []string{"close"}, []string{"close"}},
		{"several tokens", []string{"keep-alive, Upgrade"}, []string{"keep-alive", "Upgrade"}},
		{"a name alone", []string{"X-Forwarded-For"}, nil},
		{"a name and more", []string{"close, X-Real-IP"}, []string{"close"}},
		{"in front", []string{"X-Forwarded-For, close"}, []string{"close"}},
		{"in the middle", []string{"Upgrade,X-Forwarded-For,X-Hop"}, []string{"Upgrade", "X-Hop"}},
		{"in any spelling", []string{"x-FORWARDED-for , close"}, []string{"close"}},
		{"with tabs around", []string{"close,\tX-Forwarded-For\t"}, []string{"close"}},
		{"with a line end, which reverse_proxy trims", []string{"close, Forwarded\r"}, []string{"close"}},
		{"a look-alike", []string{"close, X_Forwarded_For"}, []string{"close"}},
		{"twice", []string{"X-Real-IP, X-Real-IP, close, X-Real-IP"}, []string{"close"}},
		{"over several lines", []string{"X-Forwarded-For", "close", "Forwarded, X-Hop"}, []string{"close", "X-Hop"}},
		{"lines of names only", []string{"X-Forwarded-For", "Forwarded"}, nil},
		{"what strip names", []string{"X-Tenant-IP, close"}, []string{"close"}},
		{"what forward names", []string{"X-Own-Name, close"}, []string{"close"}},
		{"empty tokens", []string{",, X-Forwarded-For ,, close ,"}, []string{"close"}},
		{"names that only begin alike", []string{"X-Forwarded-For-Test, X-Real"}, []string{"X-Forwarded-For-Test", "X-Real"}},
		{"an empty header", []string{""}, nil},
	} {
		r := newTestRequest(t, nil, strangePeer+":1", requestText("GET /"))
		r.Header["Connection"] = test.in
		got := sendThrough(t, h, r)
		if tokens := tokensOf(got.header["Connection"]); !slices.Equal(tokens, test.want) {
			t.Errorf("%s: %q: %q is left, want %q", test.why, test.in, tokens, test.want)
		}
	}
}

// FuzzConnection: no token that names an identity header survives, and all others
// keep their order.
func FuzzConnection(f *testing.F) {
	for _, seed := range []string{
		"close", "close, X-Forwarded-For", "X-Real-IP", "x-real-ip\nclose", ",,", "Upgrade,\tX_Forwarded_For ,close\nForwarded",
		"X-Forwarded-For-Test", "\"X-Forwarded-For\"", "a,b,a,X.Real.IP,b", "X-R\xc3\xa9al-IP", "\x00", " X-Client-IP ", "ForwArded\r",
	} {
		f.Add(seed, true)
		f.Add(seed, false)
	}
	client := newTestClient(f, []string{"trusted_proxies static " + trustedRanges})
	forwarder := newForwarder(client, nil, nil)
	f.Fuzz(func(t *testing.T, text string, trusted bool) {
		in := strings.Split(text, "\n")
		r := &http.Request{Header: http.Header{"Connection": slices.Clone(in)}}
		forwarder.remove(r, trusted, func(string) {})
		kept := tokensOf(r.Header["Connection"])
		var want []string
		for _, token := range tokensOf(in) {
			if !slices.ContainsFunc(wantIdentity, func(name string) bool { return sameForCGI(name, token) }) {
				want = append(want, token)
			}
		}
		if !slices.Equal(kept, want) {
			t.Errorf("%q: %q is left, want %q", in, kept, want)
		}
	})
}

// Trailers are merged into the request when its body ends, behind every handler:
// what stands there must not pass for a header.
func TestTrailers(t *testing.T) {
	const secret = "s3cret-one-0123456789abcdef"
	upstream := runRecorder(t)
	proof := "client {\ntrusted_proxies static " + trustedRanges + "\nproof X-Edge-Proof " + secret + "\n}\n"
	sites := runSites(t, "",
		site{server: "protocols h1 h2c", body: "edge_limit {\n" + proof + "strip X-Tenant-IP\n}\nreverse_proxy " + upstream},
		site{server: "protocols h1 h2c", body: "route {\nedge_limit {\n" + proof + "strip X-Tenant-IP\n}\nedge_limit {\nclient connection\n}\nreverse_proxy " + upstream + "\n}"},
		site{server: "protocols h1 h2c", body: "edge_limit {\n" + proof + "strip X-Tenant-IP\n}\nrequest_header X-Body {http.request.body}\nreverse_proxy " + upstream},
	)
	names := []string{"one handler", "two handlers", "the body read before"}
	for _, test := range []struct {
		why       string
		announced []string
		trailers  []string
		want      map[string]string // by peer: the names that are left
	}{
		{"ordinary trailers stay", []string{"X-Sum", "Etag"}, []string{"X-Sum", "Etag"},
			map[string]string{trustedPeer: "Etag X-Sum", strangePeer: "Etag X-Sum"}},
		{"identity headers go", []string{"X-Forwarded-For", "X-Real-IP", "X-Sum"}, []string{"X-Forwarded-For", "X-Real-IP", "X-Sum"},
			map[string]string{trustedPeer: "X-Sum", strangePeer: "X-Sum"}},
		{"also where there is nothing else", []string{"X-Forwarded-For"}, []string{"X-Forwarded-For"},
			map[string]string{trustedPeer: "", strangePeer: ""}},
		{"what was not announced, too", []string{"X-Sum"}, []string{"X-Sum", "X-Forwarded-For", "True-Client-IP", "X_Real_IP"},
			map[string]string{trustedPeer: "X-Sum", strangePeer: "X-Sum"}},
		{"also where nothing was announced", nil, []string{"X-Forwarded-For", "X-Edge-Proof"},
			map[string]string{trustedPeer: "", strangePeer: ""}},
		{"look-alikes go", []string{"X_Forwarded_For", "X.Real.IP", "X-Sum"}, []string{"X_Forwarded_For", "X.Real.IP", "X-Sum"},
			map[string]string{trustedPeer: "X-Sum", strangePeer: "X-Sum"}},
		{"the proof and what strip names go", []string{"X-Edge-Proof", "X-Client-IP", "X-Tenant-IP", "X-Sum"}, []string{"X-Edge-Proof", "X-Client-IP", "X-Tenant-IP", "X-Sum"},
			map[string]string{trustedPeer: "X-Sum", strangePeer: "X-Sum"}},
		{"scheme and host are a trusted peer's only", []string{"X-Forwarded-Proto", "X-Sum"}, []string{"X-Forwarded-Proto", "X-Sum"},
			map[string]string{trustedPeer: "X-Forwarded-Proto X-Sum", strangePeer: "X-Sum"}},
	} {
		check := func(i int, peer, proto string, got received) {
			t.Helper()
			left := slices.Sorted(maps.Keys(got.Trailer))
			if strings.Join(left, " ") != test.want[peer] {
				t.Errorf("%s, %s, %s from %s: %q is left, want %q", names[i], test.why, proto, peer, left, test.want[peer])
			}
			if got.Body != "hello" {
				t.Errorf("%s, %s, %s from %s: body %q", names[i], test.why, proto, peer, got.Body)
			}
			for _, name := range append(wantIdentity, "X-Edge-Proof", "X-Tenant-IP") {
				if name != "X-Forwarded-For" && got.Header.Get(name) != "" {
					t.Errorf("%s, %s, %s from %s: header %s %q", names[i], test.why, proto, peer, name, got.Header.Get(name))
				}
			}
		}
		for i, e := range sites {
			for _, peer := range []string{trustedPeer, strangePeer} {
				lines := []string{"X-Forwarded-For: " + visitor, "Transfer-Encoding: chunked"}
				if test.announced != nil {
					lines = append(lines, "Trailer: "+strings.Join(test.announced, ", "))
				}
				text := requestText("POST /", lines...) + "5\r\nhello\r\n0\r\n"
				for _, name := range test.trailers {
					text += name + ": " + forgedIP + "\r\n"
				}
				check(i, peer, "HTTP/1.1", parseReceived(t, exchange(t, e.dial(t, peer), text+"\r\n")))

				if len(test.announced) != len(test.trailers) {
					continue // an HTTP/2 client of Go's sends what it announces
				}
				client, _ := h2cClient(t, e, peer)
				check(i, peer, "HTTP/2", parseReceived(t, sendHTTP2Trailers(t, e, client, test.trailers)))
			}
		}
	}
}

func sendHTTP2Trailers(t *testing.T, e endpoint, client *http.Client, names []string) answer {
	t.Helper()
	r, err := http.NewRequest(http.MethodPost, "http://"+e.address+"/", io.NopCloser(bytes.NewBufferString("hello")))
	if err != nil {
		t.Fatal(err)
	}
	r.Host = "test.local"
	r.Header.Set("X-Forwarded-For", visitor)
	r.Trailer = http.Header{}
	for _, name := range names {
		r.Trailer.Set(name, forgedIP)
	}
	response, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil || response.ProtoMajor != 2 {
		t.Fatalf("%s: %v", response.Proto, err)
	}
	return answer{status: response.StatusCode, body: string(body)}
}

// What upstreams are told by the remote address, while they are told, and by
// Caddy's own variables.
func TestTell(t *testing.T) {
	proof := newTestHandler(t, "client {\ntrusted_proxies static "+trustedRanges+"\ntrusted_proxies_unix\nproof X-Edge-Proof s3cret-one-0123456789abcdef\n}")
	off := newTestHandler(t, clientBlock+"forward off")
	servers := newTestServers(t)
	for _, test := range []struct {
		why        string
		h          *Handler
		server     string
		remoteAddr string
		lines      []string
		told       string // the remote address behind the handler
		trusted    bool   // Caddy's verdict behind the handler
		clientIP   string
	}{
		{"a connection keeps its port", proof, "", "198.51.100.9:4711", nil, "198.51.100.9:4711", false, "198.51.100.9"},
		{"over IPv6 too", proof, "", "[2001:db8::9]:4711", nil, "[2001:db8::9]:4711", false, "2001:db8::9"},
		{"one client, one form: no zone", proof, "", "[fe80::9%eth0]:4711", nil, "[fe80::9]:4711", false, "fe80::9"},
		{"one client, one form: IPv4-mapped is IPv4", proof, "", "[::ffff:198.51.100.9]:4711", nil, "198.51.100.9:4711", false, "198.51.100.9"},
		{"a client from the chain has no port", proof, "", "127.0.0.2:4711", []string{"X-Forwarded-For: 203.0.113.7:99"}, "203.0.113.7:0", true, visitor},
		{"over IPv6 too", proof, "", "127.0.0.2:4711", []string{"X-Forwarded-For: 2001:DB8::1"}, "[2001:db8::1]:0", true, "2001:db8::1"},
		{"a client from a Unix peer", proof, "", "@", []string{"X-Forwarded-For: " + visitor}, "203.0.113.7:0", true, visitor},
		{"a proof from a stranger does not make the peer trusted", proof, "", "198.51.100.9:4711",
			[]string{"X-Edge-Proof: s3cret-one-0123456789abcdef", "X-Client-IP: " + visitor}, "203.0.113.7:0", false, visitor},
		{"unresolved: the peer, for want of anything else", proof, "", "127.0.0.2:4711", nil, "127.0.0.2:4711", true, "unresolved"},
		{"the server's trust is not the block's", proof, "lax", "127.0.1.9:4711", nil, "127.0.1.9:4711", false, strangePeer},
		{"our verdict replaces the server's", newTestHandler(t, "client connection"), "lax", "127.0.0.2:4711", []string{"X-Forwarded-For: " + forgedIP}, "127.0.0.2:4711", false, trustedPeer},
		{"the server's verdict where the block says nothing", newTestHandler(t, ""), "lax", "127.0.0.2:4711", []string{"X-Forwarded-For: " + visitor}, "203.0.113.7:0", true, visitor},
		{"forward off leaves the address", off, "", "127.0.0.2:4711", []string{"X-Forwarded-For: " + visitor}, "127.0.0.2:4711", false, visitor},
		{"and the server's verdict", off, "lax", "127.0.0.2:4711", []string{"X-Forwarded-For: " + visitor}, "127.0.0.2:4711", true, visitor},
	} {
		r := newTestRequest(t, servers[test.server], test.remoteAddr, requestText("GET /", test.lines...))
		got := sendThrough(t, test.h, r)
		if got.remoteAddr != test.told {
			t.Errorf("%s: the upstream is told %s, want %s", test.why, got.remoteAddr, test.told)
		}
		if got.trusted != test.trusted || got.clientIP != test.clientIP {
			t.Errorf("%s: Caddy's verdict is %v and its client_ip %v, want %t and %s", test.why, got.trusted, got.clientIP, test.trusted, test.clientIP)
		}
		if r.RemoteAddr != test.remoteAddr {
			t.Errorf("%s: afterwards the peer is %s, want %s", test.why, r.RemoteAddr, test.remoteAddr)
		}
	}
}

// The remote address is put back however the next handler ends.
func TestRemoteAddrIsRestored(t *testing.T) {
	h := newTestHandler(t, clientBlock)
	for _, test := range []struct {
		why  string
		next func() error
	}{
		{"an error", func() error { return errors.New("no upstream") }},
		{"a panic", func() error { panic(http.ErrAbortHandler) }},
	} {
		r := newTestRequest(t, nil, "127.0.0.2:4711", requestText("GET /", "X-Forwarded-For: "+visitor))
		func() {
			defer func() { _ = recover() }()
			_ = h.ServeHTTP(httptest.NewRecorder(), r, caddyhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
				if r.RemoteAddr != visitor+":0" {
					t.Errorf("%s: the upstream is told %s", test.why, r.RemoteAddr)
				}
				return test.next()
			}))
		}()
		if r.RemoteAddr != "127.0.0.2:4711" {
			t.Errorf("after %s the peer is %s", test.why, r.RemoteAddr)
		}
	}
}

// Caddy's own requests come over no connection: nothing in them is believed, and
// nothing is told.
func TestVirtualRequestIsStripped(t *testing.T) {
	h := newTestHandler(t, clientBlock+"forward X-Real-IP\nlimit virtual_stripped 1/h")
	for range 3 {
		r := newTestRequest(t, nil, "127.0.0.2:4711", requestText("GET /", "X-Forwarded-For: "+forgedIP, "X-Real-IP: "+forgedIP, "X_Client_IP: "+forgedIP, "Accept: a"))
		r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, nil))
		got := sendThrough(t, h, r)
		if !equalHeaders(got.header, http.Header{"X-Forwarded-For": nil, "Accept": {"a"}}) || got.remoteAddr != "127.0.0.2:4711" {
			t.Errorf("the next handler sees %q from %s", got.header, got.remoteAddr)
		}
	}
}

func TestForwardedElement(t *testing.T) {
	for _, test := range []struct{ why, client, want string }{
		{"IPv4 needs no quotes", "203.0.113.7", "for=203.0.113.7"},
		{"IPv6 is quoted and in brackets", "2001:db8::1", `for="[2001:db8::1]"`},
	} {
		client := netip.MustParseAddr(test.client)
		got := forwardedElement(client)
		if got != test.want {
			t.Errorf("%s: %s, want %s", test.why, got, test.want)
		}
		// and it is read back as the same client
		read := newTestClient(t, []string{"trusted_proxies static 127.0.0.2", "header Forwarded"})
		r := newTestRequest(t, nil, "127.0.0.2:1", requestText("GET /", "Forwarded: "+got))
		if res := read.resolve(r, varsOf(r)); res.client != client {
			t.Errorf("%s: read back as %v", got, res.client)
		}
	}
}

func TestNameSet(t *testing.T) {
	long := strings.Repeat("x", 200)
	set := newNameSet("X-Real-IP", "x_real_ip", long)
	for _, test := range []struct {
		why  string
		name string
		want bool
	}{
		{"the name", "X-Real-IP", true},
		{"in small letters", "x-real-ip", true},
		{"with another sign", "X.Real_IP", true},
		{"a byte that is no letter", "X\xffReal\x00IP", true},
		{"shorter", "X-Real-I", false},
		{"longer", "X-Real-IPs", false},
		{"another letter", "X-Reel-IP", false},
		{"a digit", "X-Rea1-IP", false},
		{"nothing", "", false},
		{"a name longer than 64", strings.ToUpper(long), true},
		{"another one of that kind", long + "x", false},
		{"one of 63", strings.Repeat("x", 63), false},
	} {
		if got := set.contains(test.name); got != test.want {
			t.Errorf("%s: %.40q is in the set: %t, want %t", test.why, test.name, got, test.want)
		}
	}
}
