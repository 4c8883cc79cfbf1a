package edgelimit

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
)

// runAdmin runs a Caddyfile, with its admin API, and returns the API's address
// and that of the site on {PORT}.
func runAdmin(t *testing.T, caddyfile string) (api, site string) {
	t.Helper()
	listen := func() net.Listener {
		listener, err := net.Listen("tcp", ":0")
		if err != nil {
			t.Fatal(err)
		}
		return listener
	}
	// both at once, else the second may get the first one's port
	first, second := listen(), listen()
	at := func(l net.Listener) string { return fmt.Sprintf("127.0.0.1:%d", l.Addr().(*net.TCPAddr).Port) }
	api, site = at(first), at(second)
	first.Close()
	second.Close()
	_, port, _ := net.SplitHostPort(site)
	_ = ownStorage(t)
	text := fmt.Sprintf("{\nadmin %s\nauto_https off\nstorage file_system %s\nlog {\noutput discard\n}\n%s", api, t.TempDir(), strings.ReplaceAll(caddyfile, "PORT", port))
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := caddy.Load(config, true); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = caddy.Stop() })
	return "http://" + api + "/edge_limit/", "http://" + site
}

// ask sends a request and returns its status and answer.
func ask(t *testing.T, method, url, body string, header ...string) (int, string) {
	t.Helper()
	r, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range header {
		name, value, _ := strings.Cut(line, ": ")
		r.Header.Add(name, value)
	}
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(answer)
}

const adminSite = `
	edge_limit {
		client {
			trusted_proxies static 127.0.0.1/32
		}
	}
}
http://localhost:PORT {
	edge_limit {
		limit login 2/h {
			ban 1h
		}
		limit keys 10/h {
			key client {header.X-Api-Key} text
		}
		ceiling all 1000/s
		in_flight busy 10
	}
	respond ok
}
http://other.example:PORT {
	edge_limit {
		client connection
	}
	respond ok
}
`

func TestAdminForgives(t *testing.T) {
	api, site := runAdmin(t, adminSite)
	chain := "X-Forwarded-For: 6.6.6.6, " + alice
	site = strings.Replace(site, "127.0.0.1", "localhost", 1)
	get := func() int {
		status, _ := ask(t, "GET", site, "", chain, "X-Api-Key: k")
		return status
	}
	for n := range 4 {
		expect(t, get() == 200, n < 2, "two pass, then the client is banned")
	}
	var report keyReport
	look := func(method string) {
		status, answer := ask(t, method, api+"limits/login/keys", `{"client": "`+alice+`"}`)
		report = keyReport{}
		if err := json.Unmarshal([]byte(answer), &report); err != nil || status != 200 {
			t.Fatalf("%d %s", status, answer)
		}
	}
	look("POST")
	if report.Remaining != 0 || report.BannedFor < 3590 || report.RetryAfter < 3590 || report.Forgiven {
		t.Errorf("a banned client is reported as %+v", report)
	}
	_, answer := ask(t, "GET", api+"limits", "")
	if !strings.Contains(answer, `"top_keys":[{"key":"`+report.Key+`"`) {
		t.Errorf("the list of limits does not show the key %s: %s", report.Key, answer)
	}
	look("DELETE")
	expect(t, report.Forgiven, true, "it was forgiven")
	expect(t, report.Remaining, 2, "and has its whole budget")
	expect(t, get(), 200, "and passes")
	look("DELETE")
	look("DELETE")
	expect(t, report.Forgiven, false, "there is nothing to forgive twice")
}

// It answers by the numbers that are in force, also where no request has come
// since they are.
func TestAdminAfterAReload(t *testing.T) {
	api, site := runAdmin(t, adminSite)
	site = strings.Replace(site, "127.0.0.1", "localhost", 1)
	for range 2 {
		ask(t, "GET", site, "", "X-Forwarded-For: "+alice, "X-Api-Key: k")
	}
	_, config := ask(t, "GET", strings.Replace(api, "/edge_limit/", "/config/", 1), "")
	changed := strings.Replace(config, `"rate":"10/h"`, `"rate":"20/h"`, 1)
	expect(t, changed != config, true, "the configuration has the limit")
	status, answer := ask(t, "POST", strings.Replace(api, "/edge_limit/", "/load", 1), changed, "Content-Type: application/json")
	expect(t, status, 200, "the reload: "+answer)
	var report keyReport
	_, answer = ask(t, "POST", api+"limits/keys/keys", `{"client": "`+alice+`", "{http.request.header.X-Api-Key}": "k"}`)
	if err := json.Unmarshal([]byte(answer), &report); err != nil {
		t.Fatal(err, answer)
	}
	expect(t, report.Remaining, 16, "what remains, two of ten being four of twenty: "+answer)
}

func TestAdminReports(t *testing.T) {
	api, site := runAdmin(t, adminSite)
	ask(t, "GET", strings.Replace(site, "127.0.0.1", "localhost", 1), "", "X-Forwarded-For: "+alice, "X-Api-Key: k")
	_, answer := ask(t, "GET", api+"limits", "")
	var reports []budgetReport
	if err := json.Unmarshal([]byte(answer), &reports); err != nil {
		t.Fatal(err)
	}
	var kinds []string
	for _, r := range reports {
		kinds = append(kinds, r.Kind+" "+r.Name)
		expect(t, r.Allowed, 1, r.Name+" allowed")
	}
	expect(t, strings.Join(kinds, ", "), "ceiling all, in_flight busy, limit keys, limit login", "what is listed")
	if strings.Contains(answer, alice) {
		t.Error("a raw key is shown")
	}
}

func TestAdminErrors(t *testing.T) {
	api, _ := runAdmin(t, adminSite)
	tests := []struct {
		why, method, path, body string
		status                  int
		words                   string
	}{
		{"a limit that is not there", "POST", "limits/nope/keys", `{"client": "192.0.2.1"}`, 404, `no limit is named \"nope\"`},
		{"a ceiling has no keys", "POST", "limits/all/keys", `{}`, 400, "is no limit"},
		{"a body that is no JSON", "POST", "limits/login/keys", `client`, 400, "JSON object"},
		{"no body", "DELETE", "limits/login/keys", ``, 400, "JSON object"},
		{"an address that is none", "POST", "limits/login/keys", `{"client": "hello"}`, 400, "is no address"},
		{"a part is missing", "POST", "limits/keys/keys", `{"client": "192.0.2.1"}`, 400, "X-Api-Key}\\\" is missing"},
		{"a part too many", "POST", "limits/login/keys", `{"client": "192.0.2.1", "x": "y"}`, 400, "parts that the key does not have"},
		{"a method that does nothing", "PUT", "limits", ``, 405, "only GET"},
		{"and for keys", "GET", "limits/login/keys", ``, 405, "only POST and DELETE"},
		{"a path that is not there", "GET", "limit", ``, 404, "limits/{name}/keys"},
		{"a peer that is none", "GET", "resolve?peer=x", ``, 400, "is no address"},
		{"a site that is none", "GET", "resolve?peer=127.0.0.1&site=nope.example", ``, 404, "no site"},
		{"a port that is none", "GET", "resolve?peer=127.0.0.1&site=localhost:1", ``, 404, "no site"},
	}
	for _, tt := range tests {
		status, answer := ask(t, tt.method, api+tt.path, tt.body)
		expect(t, status, tt.status, tt.why)
		if !strings.Contains(answer, tt.words) {
			t.Errorf("%s: the answer %s does not say %q", tt.why, answer, tt.words)
		}
	}
	if status, answer := ask(t, "POST", api+"limits/keys/keys", `{"client": "unresolved", "{http.request.header.X-Api-Key}": "k"}`); status != 200 {
		t.Errorf("the key of unresolved clients: %d %s", status, answer)
	}
}

func TestAdminResolve(t *testing.T) {
	// another server, with a site for any host and none with an edge_limit for one
	api, _ := runAdmin(t, adminSite+`
http://:20999 {
	bind 127.0.0.1
	edge_limit {
		client connection
	}
	respond ok
}
http://bare.example:20999 {
	bind 127.0.0.1
	respond ok
}
`)
	tests := []struct{ why, query, resolved, source string }{
		{"the global block", "peer=127.0.0.1&header=6.6.6.6,%20" + alice, alice, "trusted_proxies"},
		{"two lines", "peer=127.0.0.1&header=" + alice + "&header=" + bob, bob, "trusted_proxies"},
		{"a peer with a port", "peer=127.0.0.1:80&header=" + alice, alice, "trusted_proxies"},
		{"nothing sent", "peer=127.0.0.1", "", "unresolved"},
		{"a stranger", "peer=192.0.2.1&header=6.6.6.6", "192.0.2.1", "connection"},
		{"a site without its own block", "site=localhost&peer=127.0.0.1&header=" + alice, alice, "trusted_proxies"},
		{"a site for any host, by its port", "site=any.example:20999&peer=127.0.0.1&header=" + alice, "127.0.0.1", "connection"},
		{"a site of its own", "site=other.example&peer=127.0.0.1&header=" + alice, "127.0.0.1", "connection"},
	}
	for _, tt := range tests {
		_, answer := ask(t, "GET", api+"resolve?"+tt.query, "")
		var got probeAnswer
		if err := json.Unmarshal([]byte(answer), &got); err != nil {
			t.Fatalf("%s: %s", tt.why, answer)
		}
		resolved := ""
		if got.Resolved != nil {
			resolved = *got.Resolved
		}
		expect(t, resolved+" "+got.Source, tt.resolved+" "+tt.source, tt.why)
	}
}

// A site without an edge_limit is not answered for by another one's.
func TestAdminResolveOfBareSite(t *testing.T) {
	api, _ := runAdmin(t, "}\nhttp://bare.example:PORT {\nrespond ok\n}\nhttp://:PORT {\nedge_limit\nrespond ok\n}\n")
	status, answer := ask(t, "GET", api+"resolve?peer=127.0.0.1&site=bare.example", "")
	expect(t, status, 404, "status of "+answer)
	status, answer = ask(t, "GET", api+"resolve?peer=127.0.0.1&site=any.example", "")
	expect(t, status, 200, "status of "+answer)
}

// What is explained came over the network, even where the question comes over a
// Unix socket.
func TestAdminResolveOverUnixSocket(t *testing.T) {
	app := appOf(t, newInstance(t, "{\nedge_limit {\nclient {\ntrusted_proxies static 127.0.0.1\n}\n}\n}\n:80 {\nedge_limit\n}"))
	for _, tt := range []struct{ why, query, want string }{
		{"a stranger", "peer=192.0.2.1", `"resolved":"192.0.2.1","source":"connection"`},
		{"a proxy", "peer=127.0.0.1&header=" + alice, `"resolved":"` + alice + `","source":"trusted_proxies"`},
	} {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodGet, "/edge_limit/resolve?"+tt.query, nil)
		socket := &net.UnixAddr{Net: "unix", Name: "/run/caddy-admin.sock"}
		if err := app.serveResolve(w, r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, socket))); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(w.Body.String(), tt.want) {
			t.Errorf("%s: got %s, want %s", tt.why, w.Body, tt.want)
		}
	}
}

// Without edge_limit in the configuration that runs, the API says so.
func TestAdminWithoutApp(t *testing.T) {
	api, _ := runAdmin(t, "}\nhttp://localhost:PORT {\nrespond ok\n}\n")
	status, answer := ask(t, "GET", api+"limits", "")
	expect(t, status, 404, "status")
	if !strings.Contains(answer, "has no edge_limit") {
		t.Error(answer)
	}
}
