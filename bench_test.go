package edgelimit

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	_ "github.com/caddyserver/caddy/v2/modules/filestorage"
)

// What the steps of a request cost, one by one and together. The comparison with
// other limiters, and the curves drawn from these, are in bench/.

// Budgets that no benchmark uses up, so that each request is charged.
const (
	endlessLimit   = " 1000000/s {\nburst 1000000000000000\n}\n"
	endlessCeiling = " 10000000000/1h\n"
)

// BenchmarkDecision is the product's own way from an address to an answer: clock,
// key, hash, table.
func BenchmarkDecision(b *testing.B) {
	for _, n := range []int{1, 10_000, 1_000_000} {
		b.Run(fmt.Sprintf("keys=%d", n), func(b *testing.B) {
			limit := benchHandler(b, "limit bench"+endlessLimit).keyed[0]
			clients := make([]resolution, n)
			for i := range clients {
				clients[i].client = benchAddr(i)
			}
			decide := func(i int) bool {
				key, _ := limit.template.hash(&clients[i], nil)
				_, _, ok := limit.take(key, limit.gcra.emissionInterval, clock())
				return ok
			}
			for i := range clients {
				decide(i)
			}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				if !decide(i) {
					b.Fatal("denied")
				}
				if i += benchStride; i >= n {
					i %= n
				}
			}
		})
	}
}

// BenchmarkParts has what no decision can do without: a clock, a lock, a hash.
func BenchmarkParts(b *testing.B) {
	limit := benchHandler(b, "limit bench"+endlessLimit).keyed[0]
	client := resolution{client: benchAddr(1)}
	var mu sync.Mutex
	for _, part := range []struct {
		name string
		do   func()
	}{
		{"clock", func() { clock() }},
		{"mutex", func() { mu.Lock(); mu.Unlock() }},
		{"hash", func() { limit.template.hash(&client, nil) }},
	} {
		b.Run(part.name, func(b *testing.B) {
			for b.Loop() {
				part.do()
			}
		})
	}
}

// benchStride walks through keys in an order that no cache foresees.
const benchStride = 7919

// benchAddr gives each number up to 2^24 an address of its own.
func benchAddr(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{11, byte(i >> 16), byte(i >> 8), byte(i)})
}

func BenchmarkResolve(b *testing.B) {
	const proxies = "trusted_proxies static 127.0.0.1/32 10.0.0.0/8\n"
	for _, row := range []struct{ source, client, header string }{
		{"connection", "client connection", ""},
		{"trusted_proxies", "client {\n" + proxies + "}", "X-Forwarded-For: 6.6.6.6, 203.0.113.7, 10.0.0.9"},
		{"trusted_proxies_ipv6", "client {\n" + proxies + "}", "X-Forwarded-For: 2001:db8::6, 2001:db8::7, 10.0.0.9"},
		{"trusted_proxies_forwarded", "client {\n" + proxies + "header Forwarded\n}", `Forwarded: for=6.6.6.6, for="203.0.113.7:4711", for=10.0.0.9`},
		{"hops", "client {\n" + proxies + "hops 2\n}", "X-Forwarded-For: 6.6.6.6, 203.0.113.7, 10.0.0.9"},
		{"single_value", "client {\n" + proxies + "single_value\n}", "X-Forwarded-For: 203.0.113.7"},
		{"proof", "client {\nproof Proxy-Authorization secret-of-the-frontend\n}", "Proxy-Authorization: secret-of-the-frontend\r\nX-Client-IP: 203.0.113.7"},
		{"unresolved", "client {\n" + proxies + "}", ""},
	} {
		b.Run("source="+row.source, func(b *testing.B) {
			h := benchHandler(b, row.client)
			benchResolve(b, h, benchRequest(b, row.header))
		})
	}
	b.Run("source=server", func(b *testing.B) {
		server := &caddyhttp.Server{TrustedProxiesStrict: 1, ClientIPHeaders: []string{"X-Forwarded-For"}}
		r := benchRequest(b, "X-Forwarded-For: 6.6.6.6, 203.0.113.7, 10.0.0.9")
		r = r.WithContext(context.WithValue(r.Context(), caddyhttp.ServerCtxKey, server))
		vars := varsOf(r)
		vars[caddyhttp.TrustedProxyVarKey], vars[caddyhttp.ClientIPVarKey] = true, "203.0.113.7"
		benchResolve(b, benchHandler(b, ""), r)
	})
}

// BenchmarkChain shows what a longer chain costs: one that has to be read, and
// one that the caller made long and nobody reads.
func BenchmarkChain(b *testing.B) {
	const kilobytes16 = 16<<10 - 512 // of the header's value: 1587 entries, more than are read
	longest := strings.TrimSuffix(strings.Repeat("10.0.0.9, ", kilobytes16/10), ", ")
	for _, row := range []struct{ name, header, value string }{
		{"read/entries=1", "X-Forwarded-For", benchChain(1)},
		{"read/entries=16", "X-Forwarded-For", benchChain(16)},
		{"read/entries=64", "X-Forwarded-For", benchChain(64)},
		{"read/entries=1587", "X-Forwarded-For", longest},
		{"forged/entries=1", "X-Forwarded-For", benchChain(1) + ", 203.0.113.7"},
		{"forged/entries=16", "X-Forwarded-For", benchChain(16) + ", 203.0.113.7"},
		{"forged/entries=64", "X-Forwarded-For", benchChain(64) + ", 203.0.113.7"},
		{"forged/entries=1587", "X-Forwarded-For", longest + ", 203.0.113.7"},
		{"openquote/bytes=16KB", "Forwarded", `for="` + strings.Repeat(`\"`, kilobytes16/2) + ", for=203.0.113.7"},
	} {
		b.Run(row.name, func(b *testing.B) {
			h := benchHandler(b, "client {\ntrusted_proxies static 127.0.0.1/32 10.0.0.0/8\nheader "+row.header+"\n}")
			benchResolve(b, h, benchRequest(b, row.header+": "+row.value))
		})
	}
}

// benchChain is a chain of n trusted proxies.
func benchChain(n int) string {
	return strings.TrimSuffix(strings.Repeat("10.0.0.9, ", n), ", ")
}

func benchResolve(b *testing.B, h *Handler, r *http.Request) {
	vars := varsOf(r)
	b.ReportAllocs()
	for b.Loop() {
		h.client.resolve(r, vars)
	}
}

// BenchmarkHandler is the whole handler around a next that does nothing. Putting
// the request back to how it came is in each number: BenchmarkHandler/nothing
// has that alone.
func BenchmarkHandler(b *testing.B) {
	const oneOfEach = "limit bench" + endlessLimit + "ceiling bench_all" + endlessCeiling
	b.Run("nothing", func(b *testing.B) {
		benchServe(b, nil, 5, http.StatusOK)
	})
	b.Run("bare", func(b *testing.B) {
		benchServe(b, benchHandler(b, benchTrust), 5, http.StatusOK)
	})
	b.Run("allowed", func(b *testing.B) {
		benchServe(b, benchHandler(b, benchTrust+oneOfEach), 5, http.StatusOK)
	})
	b.Run("direct", func(b *testing.B) {
		var run benchRun
		run.prepare(b, benchHandler(b, oneOfEach), 5)
		run.lines = nil
		run.loop(b, http.StatusOK)
	})
	b.Run("denied", func(b *testing.B) {
		benchServe(b, benchHandler(b, benchTrust+"limit bench_denied 1/1d\nceiling bench_denied_all"+endlessCeiling), 5, http.StatusTooManyRequests)
	})
	for _, n := range []int{1, 4, 16} {
		b.Run(fmt.Sprintf("limits=%d", n), func(b *testing.B) {
			benchServe(b, benchHandler(b, benchTrust+benchLimits(n)), 5, http.StatusOK)
		})
	}
	for _, n := range []int{5, 15, 40} {
		b.Run(fmt.Sprintf("headers=%d", n), func(b *testing.B) {
			benchServe(b, benchHandler(b, benchTrust), n, http.StatusOK)
		})
	}
}

// BenchmarkHandlerParallel shows what cores cost each other: by a key or a
// ceiling that all of them want. Run it with -cpu.
func BenchmarkHandlerParallel(b *testing.B) {
	for _, row := range []struct {
		name, lines string
		oneKey      bool
	}{
		{"keys", "limit bench_parallel" + endlessLimit, false},
		{"hotkey", "limit bench_parallel" + endlessLimit, true},
		{"ceiling", "ceiling bench_parallel_all" + endlessCeiling, false},
	} {
		b.Run(row.name, func(b *testing.B) {
			h := benchHandler(b, benchTrust+row.lines)
			b.ReportAllocs()
			b.ResetTimer() // without b.Loop, what came before counts
			b.RunParallel(func(pb *testing.PB) {
				var run benchRun
				run.prepare(b, h, 5)
				for i := 0; pb.Next(); i++ {
					if !row.oneKey {
						run.lines[0] = benchVisitors[i%len(benchVisitors)]
					}
					if run.serve() != http.StatusOK {
						b.Error("denied")
						return
					}
				}
			})
		})
	}
}

var benchVisitors = func() (visitors [1024]string) {
	for i := range visitors {
		visitors[i] = benchAddr(i).String()
	}
	return visitors
}()

func benchServe(b *testing.B, h *Handler, headers, want int) {
	var run benchRun
	run.prepare(b, h, headers)
	run.loop(b, want)
}

func (run *benchRun) loop(b *testing.B, want int) {
	run.serve() // what is denied is denied from the second on
	b.ReportAllocs()
	for b.Loop() {
		if got := run.serve(); got != want {
			b.Fatalf("status %d, want %d", got, want)
		}
	}
}

func benchLimits(n int) (lines string) {
	for i := range n {
		lines += fmt.Sprintf("limit bench_%d"+endlessLimit, i)
	}
	return lines
}

const benchTrust = "client {\ntrusted_proxies static 127.0.0.1/32\n}\n"

// benchRun serves one request again and again.
type benchRun struct {
	h        *Handler
	r        *http.Request
	vars     map[string]any
	repl     *caddy.Replacer
	pristine caddy.Replacer
	lines    []string
	found    any // Caddy's client_ip
	w        benchWriter
}

var benchNext caddyhttp.Handler = caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })

func (run *benchRun) prepare(b testing.TB, h *Handler, headers int) {
	run.h = h
	run.r = benchRequest(b, "X-Forwarded-For: 203.0.113.7"+benchHeaders(headers))
	run.vars = varsOf(run.r)
	run.found = run.vars[caddyhttp.ClientIPVarKey]
	run.repl = run.r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	run.pristine = *run.repl
	run.lines = run.r.Header[headerForwardedFor]
	run.w.header = make(http.Header)
}

func (run *benchRun) serve() (status int) {
	*run.repl = run.pristine
	delete(run.vars, stateVar)
	run.vars[caddyhttp.ClientIPVarKey] = run.found
	if run.lines != nil {
		run.r.Header[headerForwardedFor] = run.lines
	} else {
		delete(run.r.Header, headerForwardedFor)
	}
	clear(run.w.header)
	run.w.status = http.StatusOK
	if run.h == nil {
		_ = benchNext.ServeHTTP(&run.w, run.r)
		return run.w.status
	}
	err := run.h.ServeHTTP(&run.w, run.r, benchNext)
	if handlerError, ok := err.(caddyhttp.HandlerError); ok {
		return handlerError.StatusCode
	}
	return run.w.status
}

// benchWriter is a response that nobody gets.
type benchWriter struct {
	header http.Header
	status int
}

func (w *benchWriter) Header() http.Header         { return w.header }
func (w *benchWriter) Write(p []byte) (int, error) { return len(p), nil }
func (w *benchWriter) WriteHeader(status int)      { w.status = status }

// benchHandler provisions a handler with the lines of its directive.
func benchHandler(b testing.TB, lines string) *Handler {
	b.Helper()
	text, _, err := caddyconfig.GetAdapter("caddyfile").Adapt(
		[]byte("{\nadmin off\nauto_https off\n}\nhttp://:20001 {\nedge_limit {\n"+lines+"\n}\n}\n"), nil)
	if err != nil {
		b.Fatalf("%v\n%s", err, lines)
	}
	config := new(caddy.Config)
	if err := json.Unmarshal(text, config); err != nil {
		b.Fatal(err)
	}
	apps := config.AppsRaw
	config.AppsRaw = nil // to be loaded in the context that can be cancelled
	config.StorageRaw = json.RawMessage(fmt.Sprintf(`{"module": "file_system", "root": %q}`, b.TempDir()))
	config.Logging = &caddy.Logging{Logs: map[string]*caddy.CustomLog{
		"default": {BaseLog: caddy.BaseLog{WriterRaw: json.RawMessage(`{"output": "discard"}`)}},
	}}
	base, err := caddy.ProvisionContext(config)
	if err != nil {
		b.Fatal(err)
	}
	config.AppsRaw = apps
	ctx, cancel := caddy.NewContext(base)
	b.Cleanup(cancel)
	app, err := ctx.App("http")
	if err != nil {
		b.Fatal(err)
	}
	for _, server := range app.(*caddyhttp.App).Servers {
		for _, handler := range server.Routes[0].Handlers {
			if h, ok := handler.(*Handler); ok {
				return h
			}
			for _, route := range handler.(*caddyhttp.Subroute).Routes {
				for _, handler := range route.Handlers {
					if h, ok := handler.(*Handler); ok {
						return h
					}
				}
			}
		}
	}
	b.Fatal("there is no handler")
	return nil
}

// benchRequest is a request as Caddy hands it to its handlers.
func benchRequest(b testing.TB, header string) *http.Request {
	b.Helper()
	text := "GET / HTTP/1.1\r\nHost: example.com\r\n"
	if header = strings.TrimPrefix(header, "\r\n"); header != "" {
		text += header + "\r\n"
	}
	r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(text + "\r\n")))
	if err != nil {
		b.Fatal(err)
	}
	r.RemoteAddr = "127.0.0.1:40000"
	r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, net.Addr(&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 80})))
	return caddyhttp.PrepareRequest(r, caddy.NewReplacer(), &benchWriter{header: make(http.Header)}, new(caddyhttp.Server))
}

// benchHeaders are n ordinary headers, the first of them as a browser sends them.
func benchHeaders(n int) string {
	var text strings.Builder
	for i, name := range []string{"User-Agent", "Accept", "Accept-Encoding", "Accept-Language", "Cookie", "Referer",
		"Sec-Fetch-Dest", "Sec-Fetch-Mode", "Sec-Fetch-Site", "Cache-Control", "If-None-Match", "If-Modified-Since",
		"Upgrade-Insecure-Requests", "Dnt", "Priority"} {
		if i < n {
			text.WriteString("\r\n" + name + ": some ordinary value of a header")
		}
	}
	for i := 15; i < n; i++ {
		fmt.Fprintf(&text, "\r\nX-Ordinary-Header-%d: some ordinary value of a header", i)
	}
	return text.String()
}
