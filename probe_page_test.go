package edgelimit

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/html"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

const browserAccepts = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"

// probedRequest is a request on its way to the probe.
type probedRequest struct {
	client *Client // nil: no edge_limit came before
	trust  string  // ranges
	peer   string
	lines  []string // of X-Forwarded-For
	header http.Header
	detail bool
	method string
	accept string
}

// answer sends the request through the resolver to the probe.
func (p probedRequest) answer(t *testing.T) *http.Response {
	t.Helper()
	method := p.method
	if method == "" {
		method = http.MethodGet
	}
	r := httptest.NewRequest(method, "/client-ip", nil)
	r.RemoteAddr = p.peer
	vars := make(map[string]any)
	ctx := context.WithValue(r.Context(), caddyhttp.VarsCtxKey, vars)
	r = r.WithContext(context.WithValue(ctx, http.LocalAddrContextKey, net.Addr(&net.TCPAddr{})))
	for name, values := range p.header {
		r.Header[name] = values
	}
	if len(p.lines) > 0 {
		r.Header[headerForwardedFor] = p.lines
	}
	if p.accept != "" {
		r.Header.Set("Accept", p.accept)
	}
	if p.client != nil {
		ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
		t.Cleanup(cancel)
		config := *p.client
		if p.trust != "" {
			static := map[string]any{"source": "static", "ranges": strings.Fields(p.trust)}
			config.TrustedProxiesRaw = []json.RawMessage{caddyconfig.JSON(static, nil)}
		}
		if err := config.provision(ctx); err != nil {
			t.Fatal(err)
		}
		state := &requestState{resolution: config.resolve(r, vars), config: &config, vars: vars, ipv4Bits: 32, ipv6Bits: 64}
		state.remember(r, nil)
	}
	recorder := httptest.NewRecorder()
	if err := (&Probe{Detail: p.detail}).ServeHTTP(recorder, r, nil); err != nil {
		t.Fatal(err)
	}
	return recorder.Result()
}

// page is the probe's page as a browser gets it.
func (p probedRequest) page(t *testing.T) *html.Node {
	t.Helper()
	p.accept = browserAccepts
	response := p.answer(t)
	if got := response.Header.Get("Content-Type"); got != "text/html; charset=utf-8" {
		t.Fatalf("Content-Type %q", got)
	}
	page, err := html.Parse(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return page
}

// elements are those of the page with this name, in order.
func elements(page *html.Node, name string) (found []*html.Node) {
	for node := range page.Descendants() {
		if node.Type == html.ElementNode && (node.Data == name || name == "") {
			found = append(found, node)
		}
	}
	return found
}

// textOf is what a reader sees of a node, without the style.
func textOf(node *html.Node) string {
	var text strings.Builder
	for child := range node.Descendants() {
		if child.Type == html.TextNode && child.Parent.Data != "style" {
			text.WriteString(child.Data)
		}
	}
	return strings.Join(strings.Fields(text.String()), " ")
}

func attribute(node *html.Node, name string) string {
	for _, attr := range node.Attr {
		if attr.Key == name {
			return attr.Val
		}
	}
	return ""
}

// drawn is the chain of the page: of each stop its role and its address.
func drawn(page *html.Node) (stops []string) {
	for _, item := range elements(page, "li") {
		text := ""
		if codes := elements(item, "code"); len(codes) > 0 {
			text = textOf(codes[0])
		}
		stops = append(stops, attribute(item, "class")+" "+text)
	}
	return stops
}

func TestProbePageDrawsTheChain(t *testing.T) {
	const peer = "10.0.0.10:4711"
	for _, row := range []struct {
		name    string
		request probedRequest
		verdict string
		heading string
		stops   []string
	}{
		{
			"nothing in front",
			probedRequest{client: &Client{Connection: true}, peer: "198.51.100.22:4711"},
			"good", "You are 198.51.100.22", []string{"client 198.51.100.22"},
		},
		{
			"nothing in front, and a forged chain",
			probedRequest{client: &Client{Connection: true}, peer: "198.51.100.22:4711", lines: []string{"192.0.2.1", "192.0.2.2"}},
			"good", "You are 198.51.100.22", []string{"client 198.51.100.22", "ignored 192.0.2.2", "ignored 192.0.2.1"},
		},
		{
			"two proxies, and a forged entry",
			probedRequest{client: new(Client), trust: "10.0.0.0/8", peer: peer, lines: []string{"192.0.2.1, 198.51.100.22, 10.0.0.7"}},
			"good", "You are 198.51.100.22", []string{"proxy 10.0.0.10", "proxy 10.0.0.7", "client 198.51.100.22", "ignored 192.0.2.1"},
		},
		{
			"all trusted: the rightmost",
			probedRequest{client: new(Client), trust: "10.0.0.0/8", peer: peer, lines: []string{"10.0.0.8, 10.0.0.7"}},
			"good", "You are 10.0.0.7", []string{"proxy 10.0.0.10", "client 10.0.0.7", "ignored 10.0.0.8"},
		},
		{
			"the proxy sends nothing",
			probedRequest{client: new(Client), trust: "10.0.0.0/8", peer: peer},
			"bad", "Your address is unknown", []string{"proxy 10.0.0.10"},
		},
		{
			"the proxy writes no address",
			probedRequest{client: new(Client), trust: "10.0.0.0/8", peer: peer, lines: []string{"192.0.2.1, unix:"}},
			"bad", "Your address is unknown", []string{"proxy 10.0.0.10", "unreadable unix:", "ignored 192.0.2.1"},
		},
		{
			"an empty entry is an entry",
			probedRequest{client: new(Client), trust: "10.0.0.0/8", peer: peer, lines: []string{"192.0.2.1,"}},
			"bad", "Your address is unknown", []string{"proxy 10.0.0.10", "unreadable (empty)", "ignored 192.0.2.1"},
		},
		{
			"several where one is wanted",
			probedRequest{client: &Client{SingleValue: true}, trust: "10.0.0.0/8", peer: peer, lines: []string{"192.0.2.1, 198.51.100.22"}},
			"bad", "Your address is unknown", []string{"proxy 10.0.0.10", "unreadable 198.51.100.22", "ignored 192.0.2.1"},
		},
		{
			"too many hops: the walk stops at what is no proxy",
			probedRequest{client: &Client{Hops: 2}, trust: "10.0.0.0/8", peer: peer, lines: []string{"192.0.2.1, 198.51.100.22"}},
			"doubt", "You are 198.51.100.22, but look here", []string{"proxy 10.0.0.10", "client 198.51.100.22", "ignored 192.0.2.1"},
		},
		{
			"hops that nobody verifies",
			probedRequest{client: &Client{Hops: 2, Unverified: true}, trust: "10.0.0.0/8", peer: peer, lines: []string{"192.0.2.1, unix:"}},
			"doubt", "You are 192.0.2.1, but look here", []string{"proxy 10.0.0.10", "proxy unix:", "client 192.0.2.1"},
		},
		{
			"a neighbour that is not trusted",
			probedRequest{client: new(Client), peer: peer, lines: []string{"198.51.100.22"}},
			"doubt", "You are 10.0.0.10, but look here", []string{"client 10.0.0.10", "ignored 198.51.100.22"},
		},
		{
			"a Unix socket",
			probedRequest{client: new(Client), peer: "@", lines: []string{"198.51.100.22"}},
			"bad", "Your address is unknown", []string{"unreadable no address", "ignored 198.51.100.22"},
		},
		{
			"a proof",
			probedRequest{
				client: &Client{Proof: &Proof{Header: "Proxy-Authorization", Secrets: []string{"sesame"}}}, peer: "203.0.113.9:4711",
				lines:  []string{"192.0.2.1"},
				header: http.Header{"Proxy-Authorization": {"sesame"}, headerClientIP: {"198.51.100.22"}},
			},
			"good", "You are 198.51.100.22", []string{"ignored 203.0.113.9", "client 198.51.100.22", "ignored 192.0.2.1"},
		},
		{
			"a proof of nobody",
			probedRequest{
				client: &Client{Proof: &Proof{Header: "Proxy-Authorization", Secrets: []string{"sesame"}}}, peer: "203.0.113.9:4711",
				header: http.Header{"Proxy-Authorization": {"sesame"}},
			},
			"bad", "Your address is unknown", []string{"ignored 203.0.113.9", "unreadable unresolved"},
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			row.request.detail = true
			page := row.request.page(t)
			if got := textOf(elements(page, "h1")[0]); got != row.heading {
				t.Errorf("heading %q, want %q", got, row.heading)
			}
			if got := attribute(elements(page, "section")[0], "class"); got != "verdict "+row.verdict {
				t.Errorf("class %q, want %q", got, row.verdict)
			}
			if got := drawn(page); !slices.Equal(got, row.stops) {
				t.Errorf("drawn %q\n want %q", got, row.stops)
			}
			if text := textOf(page); strings.Contains(text, "sesame") {
				t.Error("the page tells the secret")
			}

			// the page says what the JSON says
			var answer probeAnswer
			if err := json.NewDecoder(row.request.answer(t).Body).Decode(&answer); err != nil {
				t.Fatal(err)
			}
			text := textOf(page)
			for _, word := range append([]string{answer.Source, answer.Reason}, strings.Split(answer.Advice, "`")...) {
				if !strings.Contains(text, strings.Join(strings.Fields(word), " ")) {
					t.Errorf("the page does not say %q", word)
				}
			}
			if (answer.Advice != "") != strings.Contains(text, "What to do") {
				t.Errorf("advice %q", answer.Advice)
			}
		})
	}
}

func TestProbePageOfALongChain(t *testing.T) {
	chain := strings.Repeat("192.0.2.1, ", 200) + "198.51.100.22"
	request := probedRequest{client: new(Client), trust: "10.0.0.10", peer: "10.0.0.10:1", lines: []string{chain}, detail: true}
	stops := drawn(request.page(t))
	if len(stops) != 1+maxHops+1 || stops[len(stops)-1] != "ignored " {
		t.Errorf("%d stops, the last is %q", len(stops), stops[len(stops)-1])
	}
	request.lines = []string{strings.Repeat("x", 100_000) + ",198.51.100.22"}
	if page := textOf(request.page(t)); len(page) > 5000 || !strings.Contains(page, "xxx ...") {
		t.Errorf("a long entry makes a page of %d bytes", len(page))
	}
}

// Whatever an entry holds, the page has the same elements and attributes.
func TestProbePageEscapes(t *testing.T) {
	skeleton := func(entry string) (shape []string, text string) {
		page := probedRequest{
			client: new(Client), trust: "10.0.0.10", peer: "10.0.0.10:1", detail: true,
			lines: []string{entry}, header: http.Header{"Host": {entry}, "User-Agent": {entry}, "Referer": {entry}},
		}.page(t)
		for _, element := range elements(page, "") {
			shape = append(shape, fmt.Sprint(element.Data, element.Attr))
		}
		return shape, textOf(page)
	}
	harmless, _ := skeleton("hello")
	for _, entry := range []string{
		`<script>alert(1)</script>`, `"><img src=x onerror=alert(1)>`, `</code></li></ol><h1>You are root</h1>`,
		`'onmouseover='alert(1)`, `&lt;b&gt;`, "{{.Style}}", "</style><style>*{display:none}</style>", "<!--", "]]>",
		"javascript:alert(1)", "\u202e22.001.15.891", "\u200b", "\xff\xfe<b>", "\x7f", "\t<\t", strings.Repeat("<b>", 100),
	} {
		shape, text := skeleton(entry)
		if !slices.Equal(shape, harmless) {
			t.Errorf("%q changes the page: %q", entry, shape)
		}
		for _, r := range text {
			if r == '\u202e' || r == '\u200b' || r == '\ufffd' || r == 0x7f {
				t.Errorf("%q brings %q into the page", entry, r)
			}
		}
	}
}

func TestProbePagePolicy(t *testing.T) {
	for _, request := range []probedRequest{
		{client: new(Client), peer: "198.51.100.22:1", accept: browserAccepts},
		{client: new(Client), peer: "198.51.100.22:1", accept: browserAccepts, detail: true},
		{peer: "198.51.100.22:1", accept: browserAccepts},
	} {
		response := request.answer(t)
		page, err := html.Parse(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		styles := elements(page, "style")
		if len(styles) != 1 {
			t.Fatalf("%d styles", len(styles))
		}
		want := "default-src 'none'; style-src 'sha256-" + hashOf(styles[0].FirstChild.Data) + "'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
		if got := response.Header.Get("Content-Security-Policy"); got != want {
			t.Errorf("policy %q\n  want %q", got, want)
		}
		for _, forbidden := range []string{"script", "img", "link", "iframe", "form", "object", "base"} {
			if n := len(elements(page, forbidden)); n > 0 {
				t.Errorf("%d elements %s", n, forbidden)
			}
		}
		for _, element := range elements(page, "") {
			for _, attr := range element.Attr {
				if attr.Key == "style" || attr.Key == "src" || attr.Key == "href" || strings.HasPrefix(attr.Key, "on") {
					t.Errorf("<%s %s>", element.Data, attr.Key)
				}
			}
		}
		if lang := attribute(elements(page, "html")[0], "lang"); lang != "en" {
			t.Errorf("lang %q", lang)
		}
		for _, once := range []string{"title", "h1", "main", "header"} {
			if n := len(elements(page, once)); n != 1 {
				t.Errorf("%d elements %s", n, once)
			}
		}
	}
}

func TestProbeNegotiatesItsForm(t *testing.T) {
	for accept, wantHTML := range map[string]bool{
		"":                                 false,
		"*/*":                              false,
		"application/json":                 false,
		"text/html":                        true,
		"TEXT/HTML; Charset=utf-8":         true,
		browserAccepts:                     true,
		"text/*":                           true,
		"text/html, application/json":      false, // does not prefer
		"application/json, text/html":      false,
		"text/html;q=0.5":                  true,
		"text/html;q=0.5, application/*":   false,
		"text/html;q=0.5, */*;q=0.4":       true,
		"text/html;q=0, */*":               false,
		"text/html;q=0":                    false,
		"text/html;q=hello":                false,
		"text/html;q=nan":                  false,
		"application/json;q=0.9,text/html": true,
		"text/plain":                       false,
		"html":                             false,
		",,;,":                             false,
		strings.Repeat("a/b,", 100_000) + "text/html": false,
	} {
		if got := prefersHTML([]string{accept}); got != wantHTML {
			t.Errorf("Accept: %.60s: HTML is %v", accept, got)
		}
	}
	if !prefersHTML([]string{"text/html", "*/*;q=0.8"}) {
		t.Error("two lines are not one list")
	}
}

func TestProbeHeaders(t *testing.T) {
	for _, accept := range []string{"", browserAccepts} {
		request := probedRequest{client: new(Client), peer: "198.51.100.22:1", accept: accept}
		got := request.answer(t)
		request.method = http.MethodHead
		head := request.answer(t)
		for name, want := range map[string]string{"Cache-Control": "no-store", "Vary": "Accept", "X-Content-Type-Options": "nosniff"} {
			if got := got.Header.Get(name); got != want {
				t.Errorf("%s: %q, want %q", name, got, want)
			}
		}
		if fmt.Sprint(got.Header) != fmt.Sprint(head.Header) {
			t.Errorf("HEAD has headers %v, GET %v", head.Header, got.Header)
		}
		if n, _ := head.Body.Read(make([]byte, 1)); n > 0 {
			t.Error("HEAD has a body")
		}
		if want := fmt.Sprint(got.ContentLength); got.ContentLength <= 0 || got.Header.Get("Content-Length") != want {
			t.Errorf("Content-Length %s", got.Header.Get("Content-Length"))
		}
	}
}

// Without detail, nobody learns from the page what stands in front, or what
// others wrote.
func TestProbePageHidesTheTopology(t *testing.T) {
	request := probedRequest{client: new(Client), trust: "10.0.0.0/8", peer: "10.0.0.10:4711", lines: []string{"192.0.2.1, 198.51.100.22, 10.0.0.7"}}
	page := request.page(t)
	text := textOf(page)
	for _, secret := range []string{"10.0.0", "192.0.2.1", headerForwardedFor, "4711"} {
		if strings.Contains(text, secret) {
			t.Errorf("the page shows %s", secret)
		}
	}
	if len(elements(page, "li")) > 0 || !strings.Contains(text, "You are 198.51.100.22") || !strings.Contains(text, "edge_limit_probe /client-ip { detail }") {
		t.Errorf("the page: %s", text)
	}

	request.detail = true
	if text := textOf(request.page(t)); strings.Contains(text, "Where is the chain?") {
		t.Error("the page explains how to show what it shows")
	}
}

func TestProbePageWithoutEdgeLimit(t *testing.T) {
	text := textOf(probedRequest{peer: "198.51.100.22:1", detail: true}.page(t))
	if !strings.Contains(text, "Your address is unknown") || !strings.Contains(text, "no edge_limit came before the probe") {
		t.Errorf("the page: %s", text)
	}
}

// A private address without a doubt may still be a proxy's that nobody knows.
func TestProbePageRemarksOnPrivateAddresses(t *testing.T) {
	const remark = "This is a private address"
	for name, row := range map[string]struct {
		request probedRequest
		want    bool
	}{
		"private":                        {probedRequest{client: new(Client), peer: "172.18.0.1:1"}, true},
		"private, and that is all right": {probedRequest{client: &Client{Connection: true}, peer: "172.18.0.1:1"}, false},
		"private, and in doubt":          {probedRequest{client: new(Client), peer: "172.18.0.1:1", lines: []string{"192.0.2.1"}}, false},
		"public":                         {probedRequest{client: new(Client), peer: "198.51.100.22:1"}, false},
	} {
		if got := strings.Contains(textOf(row.request.page(t)), remark); got != row.want {
			t.Errorf("%s: the remark is there: %v", name, got)
		}
	}
}

// Every state has words on the page, and whatever is not well has advice.
func TestProbePageHasWordsForAll(t *testing.T) {
	for source := range sources {
		if sourceMeanings[source] == "" {
			t.Errorf("%v: no meaning", source)
		}
	}
	c := &Client{Header: headerForwardedFor, Proof: new(Proof)}
	for reason := reasonNone + 1; reason < reasons; reason++ {
		if reasonMeanings[reason] == "" {
			t.Errorf("%v: no meaning", reason)
		}
		for _, proven := range []bool{false, true} {
			if c.advice(&resolution{reason: reason, proven: proven}) == "" {
				t.Errorf("%v: no advice", reason)
			}
		}
	}
	if c.advice(&resolution{unverified: true}) == "" {
		t.Error("unverified: no advice")
	}
}
