package edgelimit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// live is a Caddy that runs in this process, on a loopback port, without an admin
// endpoint. Reloads go into it as they do into any other.
type live struct {
	port    int
	storage json.RawMessage
}

func startLive(t *testing.T, caddyfile string) *live {
	t.Helper()
	l := &live{port: freePort(t), storage: ownStorage(t)}
	t.Cleanup(func() {
		if err := caddy.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := l.load(t, caddyfile); err != nil {
		t.Fatal(err)
	}
	return l
}

// freePort finds a port outside of the range from which clients get theirs.
func freePort(t *testing.T) int {
	t.Helper()
	for range 100 {
		port := 20_000 + rand.IntN(10_000)
		if listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			_ = listener.Close()
			return port
		}
	}
	t.Fatal("no port is free")
	return 0
}

// config adapts a Caddyfile. SITE stands for the address that l listens on.
func (l *live) config(t *testing.T, caddyfile string) *caddy.Config {
	t.Helper()
	config := configOf(t, strings.ReplaceAll(caddyfile, "SITE", fmt.Sprintf("http://127.0.0.1:%d", l.port)))
	no := false
	config.Admin = &caddy.AdminConfig{Disabled: true, Config: &caddy.ConfigSettings{Persist: &no}}
	config.Logging = loggingTo(`{"output": "discard"}`)
	config.StorageRaw = l.storage
	config.AppsRaw["http"] = onLoopback.ReplaceAll(config.AppsRaw["http"], []byte(`"127.0.0.1:$1"`))
	config.AppsRaw["tls"] = json.RawMessage(`{"disable_storage_clean": true}`)
	return config
}

// onLoopback finds listeners on all addresses.
var onLoopback = regexp.MustCompile(`":([0-9]+)"`)

// load loads a configuration as a reload does.
func (l *live) load(t *testing.T, caddyfile string) error {
	t.Helper()
	text, err := json.Marshal(l.config(t, caddyfile))
	if err != nil {
		t.Fatal(err)
	}
	return caddy.Load(text, true)
}

func (l *live) mustLoad(t *testing.T, caddyfile string) {
	t.Helper()
	if err := l.load(t, caddyfile); err != nil {
		t.Fatal(err)
	}
	// Caddy closes the old listener in the background; until then it still accepts
	for begin := time.Now(); caddy.ListenerUsage("tcp", fmt.Sprintf("127.0.0.1:%d", l.port)) > 1; time.Sleep(time.Millisecond) {
		if time.Since(begin) > time.Minute {
			t.Fatal("the old listener stays open")
		}
	}
}

// try sends a request from one of the loopback addresses 127.0.0.1 to
// 127.255.255.254, each time over a new connection.
func (l *live) try(n int) (*http.Response, error) {
	local := net.IPv4(127, byte(n>>16), byte(n>>8), byte(n))
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext:       (&net.Dialer{LocalAddr: &net.TCPAddr{IP: local}}).DialContext,
	}
	defer transport.CloseIdleConnections()
	response, err := (&http.Client{Transport: transport, Timeout: 10 * time.Second}).Get(fmt.Sprintf("http://127.0.0.1:%d/", l.port))
	if err == nil {
		_ = response.Body.Close()
	}
	return response, err
}

// ask is try, but sends the request again where Caddy cut the connection off
// unread: for a moment after a reload, the old listener still gets some.
func (l *live) ask(t *testing.T, n int) *http.Response {
	t.Helper()
	for again := 0; ; again++ {
		response, err := l.try(n)
		if err == nil {
			return response
		}
		if again == 10 || !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
			t.Fatal(err)
		}
	}
}

func (l *live) get(t *testing.T, n int) int {
	t.Helper()
	return l.ask(t, n).StatusCode
}

func (l *live) passed(t *testing.T, requests, n int) (passed int) {
	t.Helper()
	for range requests {
		if l.get(t, n) == http.StatusOK {
			passed++
		}
	}
	return passed
}

// activeSeries are the metrics of the configuration that runs.
func activeSeries(t *testing.T) map[string]float64 {
	t.Helper()
	ctx := caddy.ActiveContext()
	return seriesOf(t, ctx.GetMetricsRegistry())
}

// stateReferences are the keys of all states, and how many hold each.
func stateReferences() map[string]int {
	held := make(map[string]int)
	states.Range(func(key, _ any) bool {
		n, _ := states.References(key)
		held[fmt.Sprint(key)] = n
		return true
	})
	return held
}

// A reload in which a name keeps its numbers renews no budget, wherever the name
// is defined.
func TestReloadRenewsNothing(t *testing.T) {
	const inSite = "SITE {\nedge_limit {\nlimit each 5/h\nceiling all 8/h\n}\nrespond ok\n}"
	for _, row := range []struct {
		reason string
		then   string
	}{
		{"the same configuration", inSite},
		{"another upstream", "SITE {\nedge_limit {\nlimit each 5/h\nceiling all 8/h\n}\nrespond other\n}"},
		{"the same numbers in other words", "SITE {\nedge_limit {\nlimit each 5/60m {\nburst 5\n}\nceiling all 8/3600s\n}\nrespond ok\n}"},
		{"a limit more", "SITE {\nedge_limit {\nlimit each 5/h\nlimit more 100/h\nceiling all 8/h\n}\nrespond ok\n}"},
		{"defined globally now", "{\nedge_limit {\nlimit each 5/h\nceiling all 8/h\n}\n}\nSITE {\nedge_limit each all\nrespond ok\n}"},
		{"two sites use it", "{\nedge_limit {\nlimit each 5/h\nceiling all 8/h\n}\n}\nSITE {\nedge_limit each all\nrespond ok\n}\nSITE/other {\nedge_limit each all\n}"},
		{"another status and match", "SITE {\nedge_limit {\nlimit each 5/h {\nstatus 420\nmatch /*\n}\nceiling all 8/h {\nstatus 509\n}\n}\nrespond ok\n}"},
	} {
		t.Run(row.reason, func(t *testing.T) {
			l := startLive(t, inSite)
			expect(t, l.passed(t, 3, 1), 3, "requests pass before the reload")
			l.mustLoad(t, row.then)
			expect(t, l.passed(t, 10, 1), 2, "requests of the client pass after it")
			expect(t, l.passed(t, 10, 2), 3, "requests of others pass after it, up to the ceiling")
			l.mustLoad(t, inSite)
			expect(t, l.passed(t, 10, 3), 0, "requests pass when it is loaded back")
		})
	}
}

// A reload that changes numbers keeps what was used: who had used his budget up
// has used it up, and is not blocked for longer than the new numbers say.
func TestReloadWithOtherNumbers(t *testing.T) {
	for _, row := range []struct {
		reason        string
		before, after string
		used, left    int
		longest       int // seconds that Retry-After may say
	}{
		{"a slower limit", "limit b 5/m", "limit b 5/h", 5, 0, 720},
		{"a faster limit", "limit b 5/h", "limit b 5/m", 5, 0, 12},
		{"a larger limit", "limit b 5/h", "limit b 50/h", 5, 0, 72},
		{"a larger burst", "limit b 5/h", "limit b 5/h {\nburst 50\n}", 5, 0, 720},
		{"a larger limit, half used", "limit b 4/h", "limit b 8/h", 2, 4, 450},
		{"a slower ceiling", "ceiling b 5/m", "ceiling b 5/h", 5, 0, 3660},
		{"a faster ceiling", "ceiling b 5/h", "ceiling b 5/m", 5, 0, 61},
		{"a larger ceiling", "ceiling b 5/h", "ceiling b 8/h", 5, 3, 3660},
		{"a smaller ceiling", "ceiling b 50/h", "ceiling b 5/h", 20, 0, 3660},
		{"a slower ceiling of many", "ceiling b 100/m", "ceiling b 100/h", 100, 0, 3660},
		{"a larger ceiling of many", "ceiling b 5/h", "ceiling b 105/h", 5, 100, 3660},
	} {
		t.Run(row.reason, func(t *testing.T) {
			site := func(budget string) string { return "SITE {\nedge_limit {\n" + budget + "\n}\nrespond ok\n}" }
			l := startLive(t, site(row.before))
			expect(t, l.passed(t, row.used, 1), row.used, "requests pass before the reload")
			l.mustLoad(t, site(row.after))
			expect(t, l.passed(t, row.left+5, 1), row.left, "requests pass after it")
			response := l.ask(t, 1)
			seconds, err := strconv.Atoi(response.Header.Get("Retry-After"))
			if err != nil || seconds < 1 || seconds > row.longest {
				t.Errorf("Retry-After %q, want at most %d", response.Header.Get("Retry-After"), row.longest)
			}
		})
	}
}

// A lower max_keys bounds the tables that are there.
func TestReloadWithFewerKeys(t *testing.T) {
	site := func(maxKeys int) string {
		return fmt.Sprintf("{\nedge_limit {\nmax_keys %d\n}\n}\nSITE {\nedge_limit {\nlimit each 5/h\n}\nrespond ok\n}", maxKeys)
	}
	l := startLive(t, site(1000))
	for n := range 200 {
		l.get(t, n+1)
	}
	keys := func() int { return limitStates()["each"].ledger.Load().Len() }
	expect(t, keys(), 200, "keys")
	l.mustLoad(t, site(20))
	l.get(t, 1000)
	expect(t, limitStates()["each"].ledger.Load().MaxKeys(), 20, "bound after the reload")
	wait(t, func() bool { return keys() <= 20 }, "the debts have moved")
	l.mustLoad(t, site(100))
	for n := range 200 {
		l.get(t, n+2000)
	}
	wait(t, func() bool { return keys() <= 100 }, "the debts have moved again")
	if n := keys(); n < 90 {
		t.Errorf("%d keys when the bound is 100 again", n)
	}
}

// A configuration that does not load, or is only validated, changes nothing: no
// budget, no reference, no metric.
func TestFailedReloadChangesNothing(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	onTakenPort := fmt.Sprintf("\nhttp://%s {\nrespond no\n}", taken.Addr())
	const running = "{\nedge_limit {\nmax_keys 1000\n}\n}\nSITE {\nedge_limit {\nlimit each 5/h\nceiling all 8/h\n}\nrespond ok\n}"
	const otherNumbers = "{\nedge_limit {\nmax_keys 10\n}\n}\nSITE {\nedge_limit {\nlimit each 500/h\nceiling all 800/h\n}\nrespond other\n}"
	const otherNames = "SITE {\nedge_limit {\nlimit new 5/h\nceiling newer 8/h\n}\nrespond other\n}"
	l := startLive(t, running)
	expect(t, l.passed(t, 2, 1), 2, "requests pass at first")
	held, series := stateReferences(), activeSeries(t)

	load := func(caddyfile string) func() error { return func() error { return l.load(t, caddyfile) } }
	loadApps := func(apps string) func() error {
		return func() error {
			config := l.config(t, running)
			if err := json.Unmarshal([]byte(apps), &config.AppsRaw); err != nil {
				t.Fatal(err)
			}
			return caddy.Run(config)
		}
	}
	for _, row := range []struct {
		reason string
		do     func() error
		fails  bool
	}{
		{"other numbers, and a port that is taken", load(otherNumbers + onTakenPort), true},
		{"other names, and a port that is taken", load(otherNames + onTakenPort), true},
		{"no names at all, and a port that is taken", load("SITE {\nrespond other\n}" + onTakenPort), true},
		{"a name with two meanings", loadApps(`{"edge_limit": {"limits": [{"name": "each", "rate": "7/h"}]}}`), true},
		{"a limit that is wrong, after one that is right", loadApps(`{"edge_limit": {"limits": [{"name": "new", "rate": "7/h"}, {"name": "wrong", "rate": "0/h"}]}}`), true},
		{"a ceiling that is wrong", loadApps(`{"edge_limit": {"ceilings": [{"name": "new", "rate": "7/h"}, {"name": "wrong", "rate": "7"}]}}`), true},
		{"an option that is wrong, after limits that are right", loadApps(`{"edge_limit": {"limits": [{"name": "new", "rate": "7/h"}], "unresolved": "maybe"}}`), true},
		{"an app that nobody knows", loadApps(`{"nobody_knows": {}}`), true},
		{"a handler whose matcher is wrong, after its limits", func() error {
			config := l.config(t, otherNumbers)
			config.AppsRaw["http"] = json.RawMessage(strings.Replace(string(config.AppsRaw["http"]),
				`"handler":"edge_limit"`, `"handler":"edge_limit","match":[{"nobody_knows":{}}]`, 1))
			return caddy.Run(config)
		}, true},
		{"validating the same", func() error { return caddy.Validate(l.config(t, running)) }, false},
		{"validating other numbers", func() error { return caddy.Validate(l.config(t, otherNumbers)) }, false},
		{"validating other names", func() error { return caddy.Validate(l.config(t, otherNames)) }, false},
		{"validating what does not load", func() error {
			config := l.config(t, otherNames)
			config.AppsRaw["nobody_knows"] = json.RawMessage("{}")
			return caddy.Validate(config)
		}, true},
	} {
		if err := row.do(); (err != nil) != row.fails {
			t.Fatalf("%s: error %v", row.reason, err)
		}
		if got := stateReferences(); !maps.Equal(got, held) {
			t.Errorf("%s: states %v, before %v", row.reason, got, held)
		}
		if got := activeSeries(t); !maps.Equal(got, series) {
			t.Errorf("%s: metrics %v, before %v", row.reason, got, series)
		}
	}
	expect(t, limitStates()["each"].ledger.Load().MaxKeys(), 1000, "max_keys")
	expect(t, l.passed(t, 10, 1), 3, "requests of the client pass afterwards")
	expect(t, l.passed(t, 10, 2), 3, "requests of others pass afterwards, up to the ceiling")
}

// A configuration that has started and does not run yet, and perhaps never will,
// leaves the debts in the numbers of the one that does.
func TestOnlyTheRunningConfigurationRescales(t *testing.T) {
	l := startLive(t, "{\nedge_limit {\nmax_keys 1000\n}\n}\nSITE {\nedge_limit {\nlimit each 1/h\nceiling all 60/h\n}\nrespond ok\n}")
	for n := range 50 {
		expect(t, l.get(t, n+1), http.StatusOK, "a first request passes")
	}
	next := newInstance(t, "{\nedge_limit {\nmax_keys 5\n}\n}\nhttp://test.local {\nedge_limit {\nlimit each 100/s\nceiling all 1000000/h\n}\nrespond ok\n}")
	for _, h := range next.handlers {
		h.now = clock
	}
	expect(t, next.passed(3, "127.0.1.1", "/"), 1, "its own requests are judged by the numbers of the one that runs")
	for n := range 50 {
		expect(t, l.get(t, n+1), http.StatusTooManyRequests, "a second request is denied")
	}
	expect(t, limitStates()["each"].ledger.Load().MaxKeys(), 1000, "max_keys")
	passed := 0
	for n := range 20 {
		passed += l.passed(t, 1, n+100)
	}
	expect(t, passed, 60-50-1, "requests pass up to the ceiling")
}

// Validating writes nothing, neither to the storage nor elsewhere.
func TestValidateWritesNothing(t *testing.T) {
	l := &live{port: freePort(t)}
	data, storage := t.TempDir(), t.TempDir()
	t.Setenv("XDG_DATA_HOME", data)
	t.Setenv("XDG_CONFIG_HOME", data)
	l.storage = json.RawMessage(fmt.Sprintf(`{"module": "file_system", "root": %q}`, storage))
	if err := caddy.Validate(l.config(t, "SITE {\nedge_limit {\nlimit each 5/h\nceiling all 8/h\n}\nrespond ok\n}")); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{data, storage} {
		err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			if err == nil && !entry.IsDir() {
				t.Errorf("%s was written", strings.TrimPrefix(path, dir))
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
	expect(t, len(stateReferences()), 0, "states held afterwards")
}

// Each configuration holds what it uses, and nothing else: a state goes with the
// last configuration that names it.
func TestStatesAreReleased(t *testing.T) {
	references := func(kind, name string) int {
		n, ok := states.References(stateKey{kind, name})
		if !ok {
			return 0
		}
		return n
	}
	expect(t, len(stateReferences()), 0, "states held before")
	t.Run("while it runs", func(t *testing.T) {
		l := startLive(t, "SITE {\nedge_limit {\nlimit a 5/h\nlimit b 5/h\nceiling c 8/h\nin_flight d 9\n}\nrespond ok\n}")
		for kind, name := range map[string]string{kindLimit: "a", kindCeiling: "c", kindInFlight: "d"} {
			expect(t, references(kind, name), 1, kind+" "+name)
		}
		l.get(t, 1)
		l.mustLoad(t, "{\nedge_limit {\nlimit a 5/h\nlimit unused 5/h\n}\n}\nSITE {\nroute {\nedge_limit a\nedge_limit {\nlimit a 5/h\nlimit e 5/h\n}\nrespond ok\n}\n}")
		for _, row := range []struct {
			kind, name string
			want       int
			reason     string
		}{
			{kindLimit, "a", 2, "defined globally and in a directive"},
			{kindLimit, "b", 0, "removed"},
			{kindLimit, "e", 1, "added"},
			{kindLimit, "unused", 1, "defined and not used"},
			{kindCeiling, "c", 0, "removed"},
			{kindInFlight, "d", 0, "removed"},
		} {
			expect(t, references(row.kind, row.name), row.want, row.kind+" "+row.name+", "+row.reason)
		}
		l.mustLoad(t, "SITE {\nedge_limit {\nlimit b 5/h\n}\nrespond ok\n}")
		expect(t, references(kindLimit, "a"), 0, "removed from both places")
		expect(t, references(kindLimit, "b"), 1, "back again")
		expect(t, l.passed(t, 10, 1), 5, "requests pass: what was removed is forgotten")
		l.mustLoad(t, "SITE {\nrespond ok\n}")
		expect(t, len(stateReferences()), 0, "states held without any edge_limit")
	})
	expect(t, len(stateReferences()), 0, "states held after it was stopped")
}

// A hundred reloads under load: no budget is renewed, and nothing is left over.
// Counters go on counting. (Connections that wait in a listener while Caddy
// replaces it are cut off, with and without edge_limit: they are counted as lost.)
func TestHundredReloads(t *testing.T) {
	site := func(n int) string {
		return fmt.Sprintf("{\nedge_limit {\nclient {\ntrusted_proxies static 10.0.0.0/8\n}\nlimit each 50/h\n}\n}\n"+
			"SITE {\nedge_limit each {\nceiling all 1000000/h\nlimit round%d 1000000/h\n}\nrespond ok\n}", n%3)
	}
	l := startLive(t, site(0))
	for n := range 5 { // until all that Caddy starts once is there
		l.mustLoad(t, site(n))
		l.get(t, 9)
	}
	held, series, goroutines := stateReferences(), len(activeSeries(t)), runtime.NumGoroutine()
	before := activeSeries(t)[requestsTotal("each", outcomeAllowed)]

	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var load sync.WaitGroup
	var passed, denied, lost int
	load.Go(func() {
		for ctx.Err() == nil {
			response, err := l.try(1)
			switch {
			case err != nil:
				lost++
			case response.StatusCode == http.StatusOK:
				passed++
			case response.StatusCode == http.StatusTooManyRequests:
				denied++
			default:
				t.Errorf("status %d", response.StatusCode)
			}
		}
	})
	counted := before
	for n := range 100 {
		l.mustLoad(t, site(n+5))
		now := activeSeries(t)[requestsTotal("each", outcomeAllowed)]
		if now < counted {
			t.Fatalf("reload %d: the counter went from %v to %v", n, counted, now)
		}
		counted = now
	}
	stop()
	load.Wait()
	if passed+denied < 20 {
		t.Errorf("%d requests were answered during 100 reloads, so little was tested", passed+denied)
	}
	after := activeSeries(t)
	within := func(what string, got float64, least int) {
		if got < float64(least) || got > float64(least+lost) {
			t.Errorf("%s: %v counted, of %d answered and %d lost", what, got, least, lost)
		}
	}
	within("allowed", after[requestsTotal("each", outcomeAllowed)]-before, passed)
	within("denied", after[requestsTotal("each", outcomeDenied)], denied)
	for l.get(t, 1) == http.StatusOK { // what the load has left of the budget
	}
	expect(t, activeSeries(t)[requestsTotal("each", outcomeAllowed)]-before, 50, "requests of one client allowed, in all configurations")
	expect(t, len(after), series, "series")

	l.mustLoad(t, site(4)) // as when the states were counted
	if got := stateReferences(); !maps.Equal(got, held) {
		t.Errorf("states %v, before %v", got, held)
	}
	var now int
	for range 500 {
		if now = runtime.NumGoroutine(); now <= goroutines+3 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	stacks := make([]byte, 1<<20)
	t.Errorf("%d goroutines, before %d:\n%s", now, goroutines, stacks[:runtime.Stack(stacks, true)])
}

// The metrics are those of the process: a reload does not start them anew, and a
// limit's go when it goes.
func TestMetricsOverReloads(t *testing.T) {
	l := startLive(t, "SITE {\nedge_limit {\nlimit stays 5/h\nlimit goes 5/h\nceiling leaves 100/h\n}\nrespond ok\n}")
	l.passed(t, 8, 1)
	got := activeSeries(t)
	expect(t, got[requestsTotal("stays", outcomeAllowed)], 5, "allowed before")
	expect(t, got[requestsTotal("stays", outcomeDenied)], 3, "denied before")
	resolved := got[resolvedTotalOf(sourceConnection, reasonNone)]

	l.mustLoad(t, "SITE {\nedge_limit {\nlimit stays 5/h\nlimit comes 5/h\n}\nrespond ok\n}")
	got = activeSeries(t)
	expect(t, got[requestsTotal("stays", outcomeAllowed)], 5, "allowed after the reload")
	l.passed(t, 8, 2)
	got = activeSeries(t)
	expect(t, got[requestsTotal("stays", outcomeAllowed)], 10, "allowed, going on")
	expect(t, got[requestsTotal("stays", outcomeDenied)], 6, "denied, going on")
	expect(t, got[requestsTotal("comes", outcomeAllowed)], 5, "of the new limit")
	expect(t, got[resolvedTotalOf(sourceConnection, reasonNone)], resolved+8, "resolutions, going on")
	for name := range got {
		if strings.Contains(name, `"goes"`) || strings.Contains(name, `"leaves"`) {
			t.Errorf("%s is still there", name)
		}
	}
	if err := caddy.Stop(); err != nil && !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if left := slices.Sorted(maps.Keys(stateReferences())); len(left) > 0 {
		t.Errorf("states after the stop: %v", left)
	}
}
