package edgelimit

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/rewrite"
	_ "github.com/caddyserver/caddy/v2/modules/filestorage"
)

// instance is a Caddy that was provisioned and not started: requests go into its
// server without a network, and the time is what the test says.
type instance struct {
	ctx      caddy.Context
	stop     func() // cleans up, once
	server   *caddyhttp.Server
	handlers []*Handler // all of them, in the order of the routes
	now      *atomic.Int64
}

// newInstance provisions a Caddyfile whose sites listen on one port.
func newInstance(t *testing.T, caddyfile string) *instance {
	t.Helper()
	i, err := tryInstance(t, configOf(t, caddyfile))
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// configOf adapts a Caddyfile.
func configOf(t *testing.T, caddyfile string) *caddy.Config {
	t.Helper()
	text, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(caddyfile), nil)
	if err != nil {
		t.Fatal(err)
	}
	config := new(caddy.Config)
	if err := json.Unmarshal(text, config); err != nil {
		t.Fatal(err)
	}
	return config
}

func tryInstance(t *testing.T, config *caddy.Config) (*instance, error) {
	t.Helper()
	return tryInstanceOn(t, config, ownStorage(t))
}

// tryInstanceOn is tryInstance with a storage that is there already.
func tryInstanceOn(t *testing.T, config *caddy.Config, storage json.RawMessage) (*instance, error) {
	t.Helper()
	if config.Logging == nil {
		config.Logging = loggingTo(`{"output": "discard"}`)
	}
	config.StorageRaw = storage
	apps := config.AppsRaw
	config.AppsRaw = nil
	base, err := caddy.ProvisionContext(config)
	if err != nil {
		return nil, err
	}
	config.AppsRaw = apps
	ctx, cancel := caddy.NewContext(base)
	i := &instance{ctx: ctx, stop: sync.OnceFunc(cancel), now: new(atomic.Int64)}
	t.Cleanup(i.stop)
	i.now.Store(int64(time.Hour))
	app, err := ctx.App("http")
	if err != nil {
		return nil, err
	}
	for _, i.server = range app.(*caddyhttp.App).Servers {
		i.collect(i.server.Routes)
		if i.server.Errors != nil {
			i.collect(i.server.Errors.Routes)
		}
		for _, route := range i.server.NamedRoutes {
			i.collect(caddyhttp.RouteList{*route})
		}
	}
	return i, nil
}

// ownStorage keeps what a test stores, and this machine's id, out of the home
// directory.
func ownStorage(t *testing.T) json.RawMessage {
	t.Setenv("XDG_DATA_HOME", t.TempDir())
	return json.RawMessage(fmt.Sprintf(`{"module": "file_system", "root": %q}`, t.TempDir()))
}

func loggingTo(writer string) *caddy.Logging {
	return &caddy.Logging{Logs: map[string]*caddy.CustomLog{"default": {BaseLog: caddy.BaseLog{WriterRaw: json.RawMessage(writer)}}}}
}

// collect finds the handlers in the routes, and gives them the test's time.
func (i *instance) collect(routes caddyhttp.RouteList) {
	for _, route := range routes {
		for _, handler := range route.Handlers {
			switch handler := handler.(type) {
			case *Handler:
				handler.now = i.now.Load
				i.handlers = append(i.handlers, handler)
			case *caddyhttp.Subroute:
				i.collect(handler.Routes)
				if handler.Errors != nil {
					i.collect(handler.Errors.Routes)
				}
			}
		}
	}
}

func (i *instance) sleep(d time.Duration) { i.now.Add(int64(d)) }

// limit returns the state of the limit or ceiling of that name.
func (i *instance) limit(t *testing.T, name string) *limitState {
	t.Helper()
	for _, h := range i.handlers {
		for _, l := range h.keyed {
			if l.Name == name {
				return l.state
			}
		}
	}
	t.Fatalf("no handler has a limit %s", name)
	return nil
}

func (i *instance) ceiling(t *testing.T, name string) *ceilingState {
	t.Helper()
	for _, h := range i.handlers {
		for _, c := range h.ceilings {
			if c.Name == name {
				return c.state
			}
		}
	}
	t.Fatalf("no handler has a ceiling %s", name)
	return nil
}

// send puts a request into the server as a connection would.
func (i *instance) send(r *http.Request) *httptest.ResponseRecorder {
	local := &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 80}
	w := httptest.NewRecorder()
	i.server.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, local)))
	return w
}

// get sends one request and returns the status of its answer.
func (i *instance) get(peer, path string, headers ...string) int {
	return i.send(requestFrom(peer, path, headers...)).Code
}

// passed sends n requests and says how many of them were answered with 200.
func (i *instance) passed(n int, peer, path string, headers ...string) (passed int) {
	for range n {
		if i.get(peer, path, headers...) == http.StatusOK {
			passed++
		}
	}
	return passed
}

// requestFrom makes a request of a peer, given as an address with or without a
// port, to test.local. Headers are written "Name: value".
func requestFrom(peer, path string, headers ...string) *http.Request {
	r := httptest.NewRequest(http.MethodGet, "http://test.local"+path, nil)
	r.RemoteAddr = peer
	if net.ParseIP(peer) != nil {
		r.RemoteAddr = net.JoinHostPort(peer, "4711")
	}
	for _, header := range headers {
		name, value, _ := strings.Cut(header, ": ")
		r.Header.Add(name, value)
	}
	return r
}

// expect fails the test when something is not what the reason says.
func expect[T comparable](t *testing.T, got, want T, reason string) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", reason, got, want)
	}
}

const (
	alice = "203.0.113.7"
	bob   = "203.0.113.8"
)

// client returns one of many addresses.
func clientNumber(n int) string { return fmt.Sprintf("198.18.%d.%d", n>>8&0xff, n&0xff) }

// A request that anything denies consumes nothing anywhere. In each row, /all
// counts against all names and /first only against the one named first; what a
// flood on /all leaves of the first budget is then used up on /first.
func TestDeniedConsumesNothing(t *testing.T) {
	for _, row := range []struct {
		reason       string
		budgets      string
		onAll, first int
		status       int
	}{
		{"denied by the second limit: the first one keeps what was not used",
			"limit first 5/m\nlimit second 2/m {\nmatch /all\n}", 2, 3, 429},
		{"denied by the first limit: the second one is as before",
			"limit second 5/m {\nmatch {\npath /all /first\n}\n}\nlimit strict 2/m {\nmatch /all\n}", 2, 3, 429},
		{"denied by a ceiling: no limit is charged",
			"limit first 5/m\nceiling second 2/m {\nmatch /all\n}", 2, 3, 503},
		{"denied by the second ceiling: neither the first nor the limit is charged",
			"limit first 5/m\nceiling wide 5/m\nceiling narrow 2/m {\nmatch /all\n}", 2, 3, 503},
		{"denied by a limit: no ceiling is charged",
			"ceiling first 5/m\nlimit second 2/m {\nmatch /all\n}", 2, 3, 429},
		{"denied by the third of three limits",
			"limit first 5/m\nlimit second 4/m {\nmatch /all\n}\nlimit third 2/m {\nmatch /all\n}", 2, 3, 429},
	} {
		t.Run(row.reason, func(t *testing.T) {
			i := newInstance(t, "http://test.local {\nedge_limit {\n"+row.budgets+"\n}\nrespond ok\n}")
			expect(t, i.passed(50, alice, "/all"), row.onAll, "of a flood on /all pass")
			expect(t, i.get(alice, "/all"), row.status, "status of the denial")
			expect(t, i.passed(50, alice, "/first"), row.first, "of a flood on /first pass")
		})
	}
}

// What is in flight is asked after limits and before ceilings, and a request that
// it denies consumes nothing either.
func TestDeniedInFlightConsumesNothing(t *testing.T) {
	i := newInstance(t, `http://test.local {
	edge_limit {
		ceiling all 6/h
		in_flight running 1
		limit each 5/h
	}
	respond ok
}`)
	slow := i.begin(t, alice)
	expect(t, slow.passed, true, "the first request passes")
	for range 20 {
		w := i.send(requestFrom(alice, "/"))
		expect(t, w.Code, 503, "denied while the first one runs")
		expect(t, w.Header().Get("Retry-After"), "", "nobody knows how long that takes")
	}
	slow.end(200)
	expect(t, i.passed(20, alice, "/"), 4, "the rest of the limit passes")
	expect(t, i.get(alice, "/"), 429, "then the limit denies")
	expect(t, i.passed(20, bob, "/"), 1, "the rest of the ceiling passes")
	expect(t, i.get(bob, "/"), 503, "then the ceiling denies")
	expect(t, i.ceiling(t, "all").count(outcomeDenied), 20, "the ceiling was not asked while one ran")
}

// A client that hammers past its own limit cannot drain what others share.
func TestHammeringDoesNotDrainCeiling(t *testing.T) {
	i := newInstance(t, `http://test.local {
	edge_limit {
		ceiling all 10/m
		limit each 2/m
	}
	respond ok
}`)
	expect(t, i.passed(1000, alice, "/"), 2, "of the hammering client's requests pass")
	for n := range 8 {
		expect(t, i.get(clientNumber(n), "/"), 200, "other clients get the rest of the ceiling")
	}
	expect(t, i.get(bob, "/"), 503, "then the ceiling is used up")
	expect(t, i.get(alice, "/"), 429, "limits are asked before ceilings, whatever their order in the Caddyfile")
	state := i.ceiling(t, "all")
	expect(t, state.count(outcomeAllowed), 10, "the ceiling allowed")
	expect(t, state.count(outcomeDenied), 1, "the ceiling denied, not counting whom a limit denied")
	expect(t, i.limit(t, "each").count(outcomeAllowed), 10, "the limit allowed, not counting whom the ceiling denied")
}

// A name is charged once a request, however often it comes up.
func TestChargedOnce(t *testing.T) {
	const globally = "{\nedge_limit {\nlimit once 4/h\nceiling top 6/h\n}\n}\n"
	for _, row := range []struct {
		reason    string
		caddyfile string
	}{
		{"one handler", globally + `http://test.local {
			edge_limit once top
			respond ok
		}`},
		{"two handlers in a row", globally + `http://test.local {
			route {
				edge_limit once top
				edge_limit once top
				respond ok
			}
		}`},
		{"three handlers, the later ones with a part of the names", globally + `http://test.local {
			route {
				edge_limit once top
				edge_limit top
				edge_limit once
				respond ok
			}
		}`},
		{"a subroute in a subroute", globally + `http://test.local {
			edge_limit once top
			handle {
				route {
					edge_limit once
					respond ok
				}
			}
		}`},
		{"a named route that is invoked", globally + `&(again) {
			edge_limit once top
			respond ok
		}
		http://test.local {
			route {
				edge_limit once top
				invoke again
			}
		}`},
		{"variables named like the directive", globally + `http://test.local {
			route {
				vars edge_limit before
				edge_limit once top
				vars edge_limit between
				edge_limit once top
				respond ok
			}
		}`},
		{"an error route that answers for the upstream", globally + `http://test.local {
			edge_limit once top
			error 500
			handle_errors 500 {
				edge_limit once top
				respond ok 200
			}
		}`},
	} {
		t.Run(row.reason, func(t *testing.T) {
			i := newInstance(t, row.caddyfile)
			expect(t, i.passed(20, alice, "/"), 4, "of the first client's requests pass")
			expect(t, i.passed(20, bob, "/"), 2, "of the second client's requests pass")
			expect(t, i.limit(t, "once").count(outcomeAllowed), 6, "the limit counted")
			expect(t, i.ceiling(t, "top").count(outcomeAllowed), 6, "the ceiling counted")
		})
	}
}

// A name that stands in one handler twice is refused, or charged once all the
// same.
func TestNameTwiceInOneHandler(t *testing.T) {
	for _, row := range []struct{ reason, handler string }{
		{"a limit, used twice", `"use": ["twice", "twice"]`},
		{"a limit, used and defined alike", `"use": ["twice"], "limits": [{"name": "twice", "rate": "4/h"}]`},
		{"a limit, defined twice alike", `"limits": [{"name": "twice", "rate": "4/h"}, {"name": "twice", "rate": "4/h"}]`},
		{"a ceiling, used twice", `"use": ["top", "top"]`},
		{"a ceiling, used and defined alike", `"use": ["top"], "ceilings": [{"name": "top", "rate": "4/h"}]`},
		{"an in_flight, used twice", `"use": ["one", "one"], "limits": [{"name": "twice", "rate": "4/h"}]`},
	} {
		t.Run(row.reason, func(t *testing.T) {
			i, err := tryInstance(t, &caddy.Config{AppsRaw: caddy.ModuleMap{
				"edge_limit": json.RawMessage(`{"limits": [{"name": "twice", "rate": "4/h"}], "ceilings": [{"name": "top", "rate": "4/h"}], "in_flight": [{"name": "one", "max": 1}]}`),
				"http": json.RawMessage(`{"servers": {"srv0": {"listen": [":80"], "routes": [{"handle": [
					{"handler": "edge_limit", ` + row.handler + `},
					{"handler": "static_response", "body": "ok"}
				]}]}}}`),
			}})
			if err != nil {
				if !strings.Contains(err.Error(), "twice") && !strings.Contains(err.Error(), "top") && !strings.Contains(err.Error(), "one") {
					t.Errorf("the error does not name the name: %v", err)
				}
				return
			}
			expect(t, i.passed(20, alice, "/"), 4, "requests pass")
		})
	}
}

// One name is one budget, wherever it is used.
func TestSharedNames(t *testing.T) {
	for _, row := range []struct {
		reason    string
		caddyfile string
	}{
		{"defined globally, used in two sites", `{
			edge_limit {
				limit shared 6/h
				ceiling top 9/h
			}
		}
		http://one.local {
			edge_limit shared top
			respond ok
		}
		http://two.local {
			edge_limit shared top
			respond ok
		}`},
		{"defined alike in two sites, in other words", `http://one.local {
			edge_limit {
				limit shared 6/h
				ceiling top 9/h
			}
			respond ok
		}
		http://two.local {
			edge_limit {
				limit shared 6/60m {
					burst 6
					key client
					status 429
				}
				ceiling top 9/3600s {
					status 503
				}
			}
			respond ok
		}`},
	} {
		t.Run(row.reason, func(t *testing.T) {
			i := newInstance(t, row.caddyfile)
			expect(t, len(i.handlers), 2, "handlers")
			site := func(host, peer string) int {
				r := requestFrom(peer, "/")
				r.Host = host
				return i.send(r).Code
			}
			var passed int
			for n := range 20 {
				if site([]string{"one.local", "two.local"}[n%2], alice) == 200 {
					passed++
				}
			}
			expect(t, passed, 6, "requests of one client pass in both sites together")
			passed = 0
			for n := range 20 {
				if site([]string{"one.local", "two.local"}[n%2], clientNumber(n)) == 200 {
					passed++
				}
			}
			expect(t, passed, 3, "requests of others pass in both sites together, up to the ceiling")
		})
	}
}

// A second meaning of a name is refused in JSON too.
func TestNameWithTwoMeanings(t *testing.T) {
	handle := func(handler string) string {
		return `{"handle": [{"handler": "edge_limit", ` + handler + `}]}`
	}
	for _, row := range []struct {
		reason      string
		first, then string
		refused     bool
	}{
		{"the same rate in two spellings", `"limits": [{"name": "a", "rate": "60/m"}]`, `"limits": [{"name": "a", "rate": "60/60s"}]`, false},
		{"another rate", `"limits": [{"name": "a", "rate": "60/m"}]`, `"limits": [{"name": "a", "rate": "61/m"}]`, true},
		{"the same speed in another window", `"limits": [{"name": "a", "rate": "60/m"}]`, `"limits": [{"name": "a", "rate": "1/s"}]`, true},
		{"another burst", `"limits": [{"name": "a", "rate": "60/m"}]`, `"limits": [{"name": "a", "rate": "60/m", "burst": 5}]`, true},
		{"another key", `"limits": [{"name": "a", "rate": "60/m"}]`, `"limits": [{"name": "a", "rate": "60/m", "key": ["client", "x"]}]`, true},
		{"another prefix", `"limits": [{"name": "a", "rate": "60/m"}]`, `"limits": [{"name": "a", "rate": "60/m", "ipv4_prefix": 24}]`, true},
		{"another status", `"limits": [{"name": "a", "rate": "60/m"}]`, `"limits": [{"name": "a", "rate": "60/m", "status": 420}]`, true},
		{"observed in one place only", `"limits": [{"name": "a", "rate": "60/m"}]`, `"limits": [{"name": "a", "rate": "60/m", "observe": true}]`, true},
		{"another match", `"limits": [{"name": "a", "rate": "60/m"}]`, `"limits": [{"name": "a", "rate": "60/m", "match": [{"path": ["/x"]}]}]`, true},
		{"a limit and a ceiling", `"limits": [{"name": "a", "rate": "60/m"}]`, `"ceilings": [{"name": "a", "rate": "60/m"}]`, true},
		{"another ceiling", `"ceilings": [{"name": "a", "rate": "60/m"}]`, `"ceilings": [{"name": "a", "rate": "61/m"}]`, true},
	} {
		t.Run(row.reason, func(t *testing.T) {
			_, err := tryInstance(t, &caddy.Config{AppsRaw: caddy.ModuleMap{"http": json.RawMessage(
				`{"servers": {"srv0": {"listen": [":80"], "routes": [` + handle(row.first) + `,` + handle(row.then) + `]}}}`)}})
			if refused := err != nil; refused != row.refused {
				t.Fatalf("error %v, want one: %v", err, row.refused)
			}
			if err != nil && !strings.Contains(err.Error(), "the name a is defined twice") {
				t.Errorf("the error does not name the name: %v", err)
			}
		})
	}
}

// What a limit's match leaves out is not charged, and what the directive's leaves
// out neither.
func TestMatch(t *testing.T) {
	for _, row := range []struct {
		reason    string
		directive string
		limited   []string // "METHOD path header..."
		free      []string
	}{
		{"no match: all", "edge_limit {\nlimit m 2/h\n}",
			[]string{"GET /", "POST /x", "HEAD /?q"}, nil},
		{"a path", "edge_limit {\nlimit m 2/h {\nmatch /api/*\n}\n}",
			[]string{"GET /api/", "POST /api/x"}, []string{"GET /", "GET /apix"}},
		{"a named matcher", "@post method POST\nedge_limit {\nlimit m 2/h {\nmatch @post\n}\n}",
			[]string{"POST /", "POST /x"}, []string{"GET /", "HEAD /"}},
		{"a block: all of its matchers", "edge_limit {\nlimit m 2/h {\nmatch {\nmethod POST\npath /x\n}\n}\n}",
			[]string{"POST /x"}, []string{"GET /x", "POST /"}},
		{"a negation", "edge_limit {\nlimit m 2/h {\nmatch {\nnot path /healthz\n}\n}\n}",
			[]string{"GET /", "GET /x"}, []string{"GET /healthz"}},
		{"a header", "edge_limit {\nlimit m 2/h {\nmatch {\nheader X-Flag 1\n}\n}\n}",
			[]string{"GET / X-Flag:1"}, []string{"GET / X-Flag:2", "GET /"}},
		{"the client, known when a limit's match is judged", "edge_limit {\nlimit m 2/h {\nmatch {\nclient_ip 203.0.113.7\n}\n}\n}",
			[]string{"GET /"}, nil},
		{"another client", "edge_limit {\nlimit m 2/h {\nmatch {\nclient_ip 203.0.113.8\n}\n}\n}",
			nil, []string{"GET /"}},
		{"the directive's matcher", "edge_limit /api/* {\nlimit m 2/h\n}",
			[]string{"GET /api/", "POST /api/x"}, []string{"GET /"}},
		{"the directive's named matcher", "@post method POST\nedge_limit @post {\nlimit m 2/h\n}",
			[]string{"POST /"}, []string{"GET /"}},
		{"both matchers", "edge_limit /api/* {\nlimit m 2/h {\nmatch {\nmethod POST\n}\n}\n}",
			[]string{"POST /api/x"}, []string{"GET /api/x", "POST /"}},
		{"everything, in so many words", "edge_limit * {\nlimit m 2/h\n}",
			[]string{"GET /", "POST /x"}, nil},
	} {
		t.Run(row.reason, func(t *testing.T) {
			i := newInstance(t, "http://test.local {\n"+row.directive+"\nrespond ok\n}")
			do := func(request string) int {
				method, rest, _ := strings.Cut(request, " ")
				path, header, _ := strings.Cut(rest, " ")
				r := requestFrom(alice, path)
				if name, value, ok := strings.Cut(header, ":"); ok {
					r.Header.Set(name, value)
				}
				r.Method = method
				return i.send(r).Code
			}
			for n := range 6 {
				for _, request := range row.free {
					expect(t, do(request), 200, request+" is free")
				}
				if len(row.limited) > 0 {
					request := row.limited[n%len(row.limited)]
					expect(t, do(request) == 200, n < 2, fmt.Sprintf("%s passes as number %d", request, n+1))
				}
			}
		})
	}
}

// A ceiling looks at the request through its own match only.
func TestCeilingMatch(t *testing.T) {
	i := newInstance(t, `http://test.local {
	edge_limit {
		ceiling writes 3/h {
			match {
				method POST
			}
		}
	}
	respond ok
}`)
	var passed int
	for n := range 20 {
		r := requestFrom(clientNumber(n), "/")
		r.Method = http.MethodPost
		if i.send(r).Code == 200 {
			passed++
		}
	}
	expect(t, passed, 3, "POST requests pass, whoever sends them")
	expect(t, i.passed(20, alice, "/"), 20, "GET requests are not counted")
}

// The directive's matcher selects what is limited. Resolving, removing and
// forwarding apply to every request that reaches the directive.
func TestMatcherSelectsOnlyLimits(t *testing.T) {
	i := newInstance(t, `http://test.local {
	@api client_ip 203.0.113.7
	edge_limit @api {
		client {
			trusted_proxies static 10.0.0.0/8
		}
		limit selected 1/h
	}
	respond "{http.edge_limit.client_ip} {client_ip} {remote_host} [{header.X-Real-IP}{header.X-Forwarded-For}]"
}`)
	for _, row := range []struct {
		reason  string
		client  string
		limited bool
	}{
		{"selected by the client that the directive itself has found", alice, true},
		{"not selected, resolved all the same", bob, false},
	} {
		for n := range 3 {
			w := i.send(requestFrom("10.0.0.1", "/", "X-Forwarded-For: 6.6.6.6, "+row.client, "X-Real-IP: 6.6.6.6"))
			expect(t, w.Code == 200, !row.limited || n == 0, row.reason+": passes")
			if w.Code == 200 {
				expect(t, w.Body.String(), row.client+" "+row.client+" "+row.client+" []", row.reason+": what comes after sees")
			}
		}
	}
}

// exempt names clients that a limit leaves alone. Ceilings do not.
func TestExempt(t *testing.T) {
	for _, row := range []struct {
		reason string
		exempt string
		client string
		free   bool
	}{
		{"in a range", "exempt 203.0.113.0/24", alice, true},
		{"a single address", "exempt 203.0.113.7", alice, true},
		{"next to it", "exempt 203.0.113.7", bob, false},
		{"in the second of two ranges", "exempt 192.0.2.0/24 203.0.113.0/24", alice, true},
		{"on a second line", "exempt 192.0.2.0/24\nexempt 203.0.113.0/24", alice, true},
		{"an IPv6 range", "exempt 2001:db8::/32", "2001:db8::1", true},
		{"outside the IPv6 range", "exempt 2001:db8::/32", "2001:db9::1", false},
		{"private_ranges, IPv4", "exempt private_ranges", "192.168.1.1", true},
		{"private_ranges, IPv6", "exempt private_ranges", "fd00::1", true},
		{"private_ranges, loopback", "exempt private_ranges", "127.0.0.1", true},
		{"private_ranges, a public client", "exempt private_ranges", alice, false},
		{"private_ranges beside a range", "exempt 203.0.113.0/24 private_ranges", "10.1.2.3", true},
		{"a module", "exempt static 203.0.113.0/24", alice, true},
		{"a module, outside", "exempt static 203.0.113.0/24", "203.0.114.7", false},
		{"an IPv4 range written as IPv6", "exempt ::ffff:203.0.113.0/120", alice, true},
		{"an IPv4 client that came over IPv6", "exempt 203.0.113.0/24", "::ffff:203.0.113.7", true},
	} {
		t.Run(row.reason, func(t *testing.T) {
			i := newInstance(t, "http://test.local {\nedge_limit {\nlimit x 2/h {\n"+row.exempt+"\n}\nceiling y 10/h\n}\nrespond ok\n}")
			wantPassed, wantStatus, wantExempt := 2, 429, uint64(0)
			if row.free {
				wantPassed, wantStatus, wantExempt = 10, 503, 21
			}
			expect(t, i.passed(20, row.client, "/"), wantPassed, "of 20 requests pass")
			expect(t, i.get(row.client, "/"), wantStatus, "status of what does not")
			expect(t, i.limit(t, "x").count(outcomeExempt), wantExempt, "requests counted as exempt")
		})
	}
}

// Who is nobody is nobody's exception: with every range exempt, the unresolved
// are limited.
func TestUnresolvedIsNotExempt(t *testing.T) {
	i := newInstance(t, `http://test.local {
	edge_limit {
		client {
			trusted_proxies static 10.0.0.0/8
		}
		limit x 2/h {
			exempt 0.0.0.0/0 ::/0
		}
	}
	respond ok
}`)
	expect(t, i.passed(20, "10.0.0.1", "/"), 2, "unresolved requests pass")
	expect(t, i.passed(20, alice, "/"), 20, "resolved ones are exempt")
}

func TestStatus(t *testing.T) {
	const private = "client {\ntrusted_proxies static 10.0.0.0/8\n}\n"
	for _, row := range []struct {
		reason string
		block  string
		peer   string
		status int

		shortest, longest int // Retry-After; 0: there is none
	}{
		{"a limit", "limit s 1/h", alice, 429, 3600, 3600},
		{"a limit that says so", "limit s 1/h {\nstatus 420\n}", alice, 420, 3600, 3600},
		{"a ceiling", "ceiling s 1/h", alice, 503, 3600, 3660},
		{"a ceiling that says so", "ceiling s 1/h {\nstatus 429\n}", alice, 429, 3600, 3660},
		{"an unresolved client, whom no waiting helps", "unresolved deny\n" + private, "10.0.0.1", 403, 0, 0},
		{"a wait below a second", "limit s 1/100ms", alice, 429, 1, 1},
		{"a wait of a second and a bit", "limit s 1/1001ms", alice, 429, 2, 2},
		{"a wait of exactly a second", "limit s 1/s", alice, 429, 1, 1},
		{"a ceiling of less than a second", "ceiling s 1/100ms", alice, 503, 1, 1},
	} {
		t.Run(row.reason, func(t *testing.T) {
			i := newInstance(t, "http://test.local {\nedge_limit {\n"+row.block+"\n}\nrespond ok\n}")
			i.get(row.peer, "/")
			w := i.send(requestFrom(row.peer, "/"))
			expect(t, w.Code, row.status, "status")
			header := w.Header().Get("Retry-After")
			if seconds, _ := strconv.Atoi(header); seconds < row.shortest || seconds > row.longest || row.longest == 0 && header != "" {
				t.Errorf("Retry-After %q, want %d to %d", header, row.shortest, row.longest)
			}
		})
	}
}

// Whoever waits as long as Retry-After says passes.
func TestRetryAfterIsHonest(t *testing.T) {
	for _, budget := range []string{
		"limit w 3/s", "limit w 7/m", "limit w 1/1500ms", "limit w 1000/h {\nburst 1\n}", "limit w 5/1d",
		"ceiling w 3/s", "ceiling w 7/m", "ceiling w 1/1500ms", "ceiling w 1000/h", "ceiling w 5/1d",
	} {
		t.Run(budget, func(t *testing.T) {
			i := newInstance(t, "http://test.local {\nedge_limit {\n"+budget+"\n}\nrespond ok\n}")
			for range 10 {
				w := i.send(requestFrom(alice, "/"))
				for w.Code == 200 {
					i.sleep(time.Millisecond)
					w = i.send(requestFrom(alice, "/"))
				}
				seconds, err := time.ParseDuration(w.Header().Get("Retry-After") + "s")
				if err != nil || seconds < time.Second {
					t.Fatalf("Retry-After %q", w.Header().Get("Retry-After"))
				}
				i.sleep(seconds)
				expect(t, i.get(alice, "/"), 200, "after Retry-After")
			}
		})
	}
}

// observe counts and denies nothing, on a limit, a ceiling, a site or globally.
func TestObserve(t *testing.T) {
	for _, row := range []struct {
		reason       string
		global, site string
		passed       int
		l, c         [outcomes]uint64 // of the limit and the ceiling: allowed, denied, would_deny
	}{
		{"nothing is observed", "", "limit l 4/h\nceiling c 6/h", 4,
			[outcomes]uint64{4, 16, 0}, [outcomes]uint64{4, 0, 0}},
		{"the limit is observed, the ceiling denies: the limit would have been first", "", "limit l 4/h {\nobserve\n}\nceiling c 6/h", 6,
			[outcomes]uint64{4, 0, 16}, [outcomes]uint64{6, 14, 0}},
		{"the ceiling is observed, the limit denies", "", "limit l 4/h\nceiling c 2/h {\nobserve\n}", 4,
			[outcomes]uint64{4, 16, 0}, [outcomes]uint64{2, 0, 2}},
		{"the site is observed", "", "observe\nlimit l 4/h\nceiling c 6/h", 20,
			[outcomes]uint64{4, 0, 16}, [outcomes]uint64{6, 0, 14}},
		{"everything is observed", "observe", "limit l 4/h\nceiling c 6/h", 20,
			[outcomes]uint64{4, 0, 16}, [outcomes]uint64{6, 0, 14}},
		{"a single limit, observed by its own word", "", "limit l 4/h {\nobserve\n}\nceiling c 6/h {\nmatch /never\n}", 20,
			[outcomes]uint64{4, 0, 16}, [outcomes]uint64{}},
		{"a single ceiling, observed by its own word", "", "limit l 4/h {\nmatch /never\n}\nceiling c 6/h {\nobserve\n}", 20,
			[outcomes]uint64{}, [outcomes]uint64{6, 0, 14}},
	} {
		t.Run(row.reason, func(t *testing.T) {
			i := newInstance(t, "{\nedge_limit {\n"+row.global+"\n}\n}\nhttp://test.local {\nedge_limit {\n"+row.site+"\n}\nrespond ok\n}")
			expect(t, i.passed(20, alice, "/"), row.passed, "of 20 requests pass")
			for o := range outcomes {
				expect(t, i.limit(t, "l").count(o), row.l[o], "limit, "+outcomeNames[o])
				expect(t, i.ceiling(t, "c").count(o), row.c[o], "ceiling, "+outcomeNames[o])
			}
		})
	}
}

// While a site is observed its budgets refill as they would, so that the numbers
// say what would happen.
func TestObservedBudgetRefills(t *testing.T) {
	i := newInstance(t, "http://test.local {\nedge_limit {\nobserve\nlimit l 2/m\n}\nrespond ok\n}")
	for range 10 {
		i.passed(5, alice, "/")
		i.sleep(time.Minute)
	}
	expect(t, i.limit(t, "l").count(outcomeAllowed), 20, "allowed")
	expect(t, i.limit(t, "l").count(outcomeWouldDeny), 30, "would_deny")
}

func TestUnresolved(t *testing.T) {
	const proxy, proxy2 = "10.0.0.1", "10.0.0.2"
	for _, row := range []struct {
		reason          string
		global, site    string
		passed          int // of 20 without a header, through two proxies
		status          int // of what does not pass
		resolved        int // of 20 with a header, afterwards
		counted, exempt uint64
	}{
		{"share is the default: one budget for all of them, and nobody else's", "", "", 3, 429, 3, 3, 0},
		{"share", "", "unresolved share", 3, 429, 3, 3, 0},
		{"share, globally", "unresolved share", "", 3, 429, 3, 3, 0},
		{"deny", "", "unresolved deny", 0, 403, 3, 0, 0},
		{"deny, globally", "unresolved deny", "", 0, 403, 3, 0, 0},
		{"exempt: ceilings still apply", "", "unresolved exempt", 10, 503, 0, 0, 20},
		{"exempt, globally", "unresolved exempt", "", 10, 503, 0, 0, 20},
		{"the site's own word replaces the global one", "unresolved deny", "unresolved share", 3, 429, 3, 3, 0},
		{"observe denies nobody", "", "unresolved deny\nobserve", 20, 0, 20, 3, 0},
		{"observe, globally, denies nobody", "observe", "unresolved deny", 20, 0, 20, 3, 0},
	} {
		t.Run(row.reason, func(t *testing.T) {
			i := newInstance(t, "{\nedge_limit {\nclient {\ntrusted_proxies static 10.0.0.0/8\n}\n"+row.global+"\n}\n}\n"+
				"http://test.local {\nedge_limit {\n"+row.site+"\nlimit u 3/h\nceiling top 10/h\n}\nrespond ok\n}")
			var passed int
			for n := range 20 {
				switch code := i.get([]string{proxy, proxy2}[n%2], "/"); code {
				case 200:
					passed++
				case row.status:
				default:
					t.Errorf("status %d, want 200 or %d", code, row.status)
				}
			}
			expect(t, passed, row.passed, "unresolved requests pass")
			expect(t, i.limit(t, "u").count(outcomeAllowed), row.counted, "unresolved requests that the limit counted")
			expect(t, i.limit(t, "u").count(outcomeExempt), row.exempt, "unresolved requests that are exempt")
			expect(t, i.passed(20, proxy, "/", "X-Forwarded-For: "+alice), row.resolved, "requests of a resolved client pass")
		})
	}
}

// unresolved deny concerns the requests that the matcher selects, with limits and
// without.
func TestUnresolvedDenySelected(t *testing.T) {
	for _, limits := range []string{"", "limit u 100/h"} {
		i := newInstance(t, `http://test.local {
	@all not path /healthz
	edge_limit @all {
		client {
			trusted_proxies static 10.0.0.0/8
		}
		unresolved deny
		`+limits+`
	}
	respond ok
}`)
		expect(t, i.get("10.0.0.1", "/"), 403, "unresolved and selected")
		expect(t, i.get("10.0.0.1", "/healthz"), 200, "unresolved and not selected")
		expect(t, i.get("10.0.0.1", "/", "X-Forwarded-For: "+alice), 200, "resolved")
	}
}

// The names of a run that was denied are not charged again when an error route
// runs a handler with the same names: what the first run left untouched stays
// untouched. Names that only the error route has are charged.
func TestErrorRouteAfterDenial(t *testing.T) {
	i := newInstance(t, `{
	edge_limit {
		limit wide 5/h
		limit narrow 2/h {
			match {
				path /denied
			}
		}
		ceiling top 100/h
		limit pages 3/h
	}
}
http://test.local {
	edge_limit wide narrow top
	respond ok
	handle_errors {
		edge_limit wide narrow top pages
		respond "{err.status_code} {http.edge_limit.exceeded.name} {http.edge_limit.exceeded.retry_after}" 418
	}
}`)
	expect(t, i.passed(2, alice, "/denied"), 2, "the narrow limit lets pass")
	for range 3 {
		w := i.send(requestFrom(alice, "/denied"))
		expect(t, w.Code, 418, "the error route answers")
		expect(t, w.Body.String(), "429 narrow 1800", "it knows what was denied")
		expect(t, w.Header().Get("Retry-After"), "1800", "Retry-After survives")
	}
	expect(t, i.get(alice, "/denied"), 429, "a limit of the error route's own can deny there")
	expect(t, i.limit(t, "pages").count(outcomeAllowed), 3, "the error route's own limit counted")
	expect(t, i.limit(t, "narrow").count(outcomeDenied), 4, "each denial is counted once")
	expect(t, i.passed(20, alice, "/"), 3, "what was left of the wide limit passes")
	expect(t, i.ceiling(t, "top").count(outcomeAllowed), 5, "the ceiling counted what passed")
}

// A key is made of what its own limit's matchers have found, whatever the matchers
// of those behind it find: there a caller could choose his key.
func TestKeysOfWhatMatchersFind(t *testing.T) {
	const limited = `limit a 1/m {
		key {http.regexp.1}
		key_writer server
		match {
			path_regexp ^/user/(\w+)
		}
	}
	`
	for _, behind := range []string{"limit b 100/m", "ceiling b 100/s", "in_flight b 100"} {
		site := limited + behind + " {\nmatch {\nheader_regexp X-Foo ^(.*)$\n}\n}"
		fleet, _, _ := newFleetInstance(t, "", site)
		for what, i := range map[string]*instance{
			"alone":        newInstance(t, "http://test.local {\nedge_limit {\nclient connection\n"+site+"\n}\nrespond ok\n}"),
			"with a store": fleet,
		} {
			for n, value := range []string{"1", "2", "3"} {
				r := requestFrom(alice, "/user/joe")
				r.Header.Set("X-Foo", value)
				expect(t, i.send(r).Code == 200, n == 0, what+", "+behind+", a forger's request")
			}
			i.stop()
		}
	}
}

// What would be denied for being unresolved is counted once a request as well,
// and a handler that is not on trial denies it all the same.
func TestUnresolvedWouldDenyIsCountedOnce(t *testing.T) {
	for _, row := range []struct {
		second string
		status int
	}{{"observe", 200}, {"", 403}} {
		i := newInstance(t, "{\nedge_limit {\nclient {\ntrusted_proxies static 10.0.0.0/8\n}\nunresolved deny\n}\n}\n"+
			"http://test.local {\nroute {\nedge_limit {\nobserve\n}\nedge_limit {\n"+row.second+"\n}\nrespond ok\n}\n}")
		before := unresolvedDenials.count(outcomeWouldDeny)
		expect(t, i.get("10.0.0.1", "/"), row.status, "a trial, then "+row.second)
		expect(t, unresolvedDenials.count(outcomeWouldDeny)-before, 1, "would_deny")
	}
}

// The same for a client that is denied because it is unresolved: the error route
// is what answers, and the denial is counted once.
func TestErrorRouteAfterUnresolvedDenial(t *testing.T) {
	i := newInstance(t, `{
	edge_limit {
		client {
			trusted_proxies static 10.0.0.0/8
		}
		unresolved deny
	}
}
http://test.local {
	edge_limit
	respond ok
	handle_errors {
		edge_limit
		respond "{err.status_code} {http.edge_limit.exceeded.name}" 418
	}
}`)
	before := unresolvedDenials.count(outcomeDenied)
	for range 3 {
		w := i.send(requestFrom("10.0.0.1", "/"))
		expect(t, w.Code, 418, "the error route answers")
		expect(t, w.Body.String(), "403 unresolved", "it knows why")
	}
	expect(t, unresolvedDenials.count(outcomeDenied)-before, 3, "denials are counted")
}

// Observed, it is counted once a request too, however often handlers run.
func TestUnresolvedIsObservedOnce(t *testing.T) {
	i := newInstance(t, `{
	edge_limit {
		client {
			trusted_proxies static 10.0.0.0/8
		}
		unresolved deny
		observe
	}
}
http://test.local {
	route {
		edge_limit
		edge_limit
		respond ok
	}
}`)
	before := unresolvedDenials.count(outcomeWouldDeny)
	expect(t, i.passed(3, "10.0.0.1", "/"), 3, "requests pass")
	expect(t, unresolvedDenials.count(outcomeWouldDeny)-before, 3, "would-be denials are counted")
}

// Whatever the method, a request is a request.
func TestMethodsCountAlike(t *testing.T) {
	methods := []string{"GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "TRACE", "CONNECT", "BREW", "get", "PROPFIND"}
	for _, budget := range []string{"limit m 11/h", "ceiling m 11/h"} {
		i := newInstance(t, "http://test.local {\nedge_limit {\n"+budget+"\n}\nrespond ok\n}")
		for round := range 2 {
			for _, method := range methods {
				r := requestFrom(alice, "/")
				r.Method = method
				expect(t, i.send(r).Code == 200, round == 0, fmt.Sprintf("%s, %s passes in round %d", budget, method, round+1))
			}
		}
	}
}

// One client is one bucket, over any port, connection, version and spelling.
func TestOneClientOneBucket(t *testing.T) {
	for _, row := range []struct {
		reason string
		peers  []string
		one    bool
	}{
		{"two ports", []string{alice + ":1", alice + ":2", alice + ":65535"}, true},
		{"IPv4 and IPv4 over IPv6", []string{alice + ":1", "[::ffff:203.0.113.7]:1", "[::ffff:cb00:7107]:9"}, true},
		{"one IPv6 address in two spellings", []string{"[2001:db8::1]:1", "[2001:db8:0:0:0:0:0:1]:2", "[2001:DB8::1]:3"}, true},
		{"one /64", []string{"[2001:db8::1]:1", "[2001:db8::2]:1", "[2001:db8::ffff:ffff:ffff:ffff]:1"}, true},
		{"zones", []string{"[fe80::1%eth0]:1", "[fe80::1%eth1]:1", "[fe80::1]:1"}, true},
		{"two addresses", []string{alice + ":1", bob + ":1"}, false},
		{"two /64", []string{"[2001:db8::1]:1", "[2001:db8:0:1::1]:1"}, false},
		{"two IPv4 clients behind one NAT64", []string{"[64:ff9b::203.0.113.7]:1", "[64:ff9b::203.0.113.8]:1"}, false},
	} {
		t.Run(row.reason, func(t *testing.T) {
			i := newInstance(t, "http://test.local {\nedge_limit {\nlimit one 6/h\n}\nrespond ok\n}")
			var passed int
			for n := range 20 * len(row.peers) {
				r := requestFrom(row.peers[n%len(row.peers)], "/")
				if n%3 == 1 {
					r.Proto, r.ProtoMajor, r.ProtoMinor = "HTTP/2.0", 2, 0
				}
				if i.send(r).Code == 200 {
					passed++
				}
			}
			wantPassed := 6
			if !row.one {
				wantPassed *= len(row.peers)
			}
			expect(t, passed, wantPassed, "requests pass")
		})
	}
}

// Early data proves nobody's address, and Caddy's own requests come from nobody:
// neither is charged.
func TestNobodyIsCharged(t *testing.T) {
	i := newInstance(t, "http://test.local {\nedge_limit {\nlimit n 2/h\nceiling m 2/h\n}\nrespond ok\n}")
	for range 10 {
		r := requestFrom(alice, "/")
		r.TLS = new(tls.ConnectionState)
		expect(t, i.send(r).Code, http.StatusTooEarly, "early data")

		w := httptest.NewRecorder()
		i.server.ServeHTTP(w, requestFrom(alice, "/")) // over no connection
		expect(t, w.Code, 200, "Caddy's own request")
	}
	expect(t, i.passed(10, alice, "/"), 2, "the budget is whole")
}

// However many come at once: not one more, and not one less.
func TestConcurrentRequests(t *testing.T) {
	const requests = 1000
	for _, row := range []struct {
		reason  string
		budgets string
		clients int
		passed  int64
	}{
		{"one client, its limit is what holds", "limit l 100/h\nceiling c 500/h", 1, 100},
		{"one client, the ceiling is what holds", "limit l 500/h\nceiling c 100/h", 1, 100},
		{"one client, both hold", "limit l 100/h\nceiling c 100/h", 1, 100},
		{"ten clients, their limits hold", "limit l 10/h\nceiling c 500/h", 10, 100},
		{"all clients differ, the ceiling holds", "limit l 10/h\nceiling c 100/h", requests, 100},
		{"two limits and two ceilings", "limit l 300/h\nlimit m 250/h\nceiling c 200/h\nceiling d 150/h", 1, 150},
		{"a limit alone", "limit l 100/h", 1, 100},
		{"a ceiling alone", "ceiling c 100/h", requests, 100},
		{"observed: all pass", "observe\nlimit l 100/h\nceiling c 100/h", 1, requests},
	} {
		t.Run(row.reason, func(t *testing.T) {
			i := newInstance(t, "http://test.local {\nedge_limit {\n"+row.budgets+"\n}\nrespond ok\n}")
			var passed, denied atomic.Int64
			var start, done sync.WaitGroup
			start.Add(1)
			for n := range requests {
				done.Go(func() {
					r := requestFrom(clientNumber(n%row.clients), "/")
					start.Wait()
					if i.send(r).Code == 200 {
						passed.Add(1)
					} else {
						denied.Add(1)
					}
				})
			}
			start.Done()
			done.Wait()
			expect(t, passed.Load(), row.passed, "requests pass")
			expect(t, denied.Load(), requests-row.passed, "requests are denied")
			var counted uint64
			for _, h := range i.handlers {
				for _, l := range h.keyed {
					counted = max(counted, l.state.count(outcomeAllowed)+l.state.count(outcomeWouldDeny))
				}
				for _, c := range h.ceilings {
					counted = max(counted, c.state.count(outcomeAllowed)+c.state.count(outcomeWouldDeny))
				}
			}
			expect(t, counted, uint64(row.passed), "requests are counted as passed")
		})
	}
}

// A request that finds a budget used up between asking and charging gives back
// what it was charged before, to the last nanosecond.
func TestConcurrentDenialGivesBack(t *testing.T) {
	for round := range 100 {
		i := newInstance(t, `http://test.local {
	edge_limit {
		limit first 1000/h
		limit second 1000/h
		ceiling wide 1000/h
		ceiling narrow 3/h
	}
	respond ok
}`)
		passed := atOnce(30, func(int) bool { return i.get(alice, "/") == http.StatusOK })
		expect(t, passed, 3, "requests pass")
		for _, limit := range i.handlers[0].keyed {
			for _, tat := range limit.state.ledger.Load().All() {
				expect(t, (tat-i.now.Load())/limit.gcra.emissionInterval, 3, "requests are owed to the limit "+limit.Name)
			}
		}
		for _, ceiling := range i.handlers[0].ceilings {
			used := ceiling.state.window.usedRatio(i.now.Load()) * float64(ceiling.rate.count)
			expect(t, math.Round(used), 3, "requests are counted by the ceiling "+ceiling.Name)
		}
		if i.stop(); t.Failed() {
			t.Fatalf("in round %d", round+1)
		}
	}
}

// A rotated client never makes a table larger than its bound, is never denied
// for somebody else's debt, and does not free who was blocked before.
func TestRotatedClientsStayWithinBound(t *testing.T) {
	const maxKeys = 1000
	i := newInstance(t, `{
	edge_limit {
		max_keys 1000
	}
}
http://test.local {
	edge_limit {
		limit r 5/h
	}
	respond ok
}`)
	expect(t, i.passed(10, alice, "/"), 5, "a client uses up its budget")
	buckets := i.limit(t, "r").ledger.Load()
	for n := range 50_000 {
		if code := i.get(clientNumber(n), "/"); code != 200 {
			t.Fatalf("fresh client %d: status %d", n, code)
		}
		if n%100 == 0 && buckets.Len() > maxKeys {
			t.Fatalf("%d keys after %d clients, above the bound of %d", buckets.Len(), n, maxKeys)
		}
	}
	expect(t, buckets.MaxKeys(), maxKeys, "bound")
	if held := buckets.Len(); held > maxKeys || held < maxKeys*9/10 {
		t.Errorf("%d keys are held, want nearly %d and no more", held, maxKeys)
	}
	if _, indebted := buckets.Forgotten(); indebted < 48_000 {
		t.Errorf("%d forgotten debts were counted, of 50000 clients in %d places", indebted, maxKeys)
	}
	expect(t, i.get(alice, "/"), 429, "who was blocked stays blocked")
}

// decide itself: what it says of a denial, and that it looks at no clock but the
// time it is given.
func TestDecide(t *testing.T) {
	i := newInstance(t, `http://test.local {
	edge_limit {
		limit a 2/m
		ceiling b 3/m
	}
	respond ok
}`)
	h := i.handlers[0]
	decide := func(peer string, now int64) denial {
		t.Helper()
		r := requestFrom(peer, "/")
		r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, &net.TCPAddr{}))
		r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), httptest.NewRecorder(), i.server)
		state, first := h.resolve(r, localAddr(r))
		expect(t, first, true, "the request is new")
		charges, denied, err := h.decide(r, state, nil, now)
		if err != nil {
			t.Fatal(err)
		}
		expect(t, len(charges) == 2, denied.status == 0, "charged if not denied")
		again, deniedAgain, err := h.decide(r, state, nil, now)
		if len(again) > 0 || deniedAgain.status != 0 || err != nil {
			t.Errorf("a second run says %v, %+v, %v", again, deniedAgain, err)
		}
		return denied
	}
	now := int64(time.Hour)
	expect(t, decide(alice, now).status, 0, "first")
	expect(t, decide(alice, now+1).status, 0, "second")
	got := decide(alice, now+2)
	expect(t, got.name, "a", "what denies")
	expect(t, got.status, 429, "with which status")
	expect(t, got.wait, 30*time.Second-2, "for how long")
	expect(t, got.err.Error(), "edge_limit: limit a exceeded", "as which error")
	expect(t, decide(bob, now+3).status, 0, "another client")
	got = decide(bob, now+4)
	expect(t, got.name, "b", "what denies then")
	expect(t, got.status, 503, "with which status then")
	expect(t, got.err.Error(), "edge_limit: ceiling b exceeded", "as which error then")
	if got.wait < 59*time.Second || got.wait > 61*time.Second {
		t.Errorf("wait of the ceiling: %v", got.wait)
	}
}
