package e2e

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// storeUnderTest is a fleet whose budgets are in one store, with what all of
// the scenarios need.
type storeUnderTest struct {
	*fleet
	visitors
	globals string
	app     *holder
}

// holder is an application that answers /hold only when it is told to.
type holder struct {
	addr    string
	mu      sync.Mutex
	release map[string]chan struct{} // by query
	arrived chan string
}

func startHolder(t *testing.T) *holder {
	t.Helper()
	h := &holder{release: make(map[string]chan struct{}), arrived: make(chan string, 100)}
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		h.arrived <- r.URL.RawQuery
		select {
		case <-h.gate(r.URL.RawQuery):
		case <-r.Context().Done():
		}
	}))
	t.Cleanup(server.Close)
	h.addr = server.Listener.Addr().String()
	return h
}

func (h *holder) gate(name string) chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.release[name] == nil {
		h.release[name] = make(chan struct{})
	}
	return h.release[name]
}

// The suite's sites. Each scenario has names, paths and visitors of its own.
// Rates are by the hour where a test must not see a budget refill.
const scenarioSites = `
handle /burst {
	edge_limit {
		limit burst 5/h
	}
	respond ok
}
handle /refill {
	edge_limit {
		limit refill 2/2s
	}
	respond ok
}
handle /cost {
	edge_limit {
		ceiling cost_bound 1000000/s
		limit cost 10/h {
			cost {query.n}
		}
	}
	respond ok
}
handle /ban {
	edge_limit {
		limit ban 60/h {
			burst 2
			ban 1h
		}
	}
	respond ok
}
handle /banned_shortly {
	edge_limit {
		limit banned_shortly 1/s {
			ban 2s
		}
	}
	respond ok
}
handle /extend {
	edge_limit {
		limit extend 60/h {
			burst 2
			ban 10m extend
		}
	}
	respond ok
}
handle /login {
	edge_limit {
		limit login 3/h {
			on_status 401
		}
	}
	respond ok {query.status}
}
handle /late {
	edge_limit {
		limit late 3/h {
			on_status late 401
		}
	}
	respond ok {query.status}
}
handle /together {
	edge_limit {
		ceiling together_all 4/h
		limit together_client 2/h
		limit together_name 5/h {
			key {query.name}
		}
	}
	respond ok
}
handle /at_once {
	edge_limit {
		in_flight at_once 2
	}
	reverse_proxy HOLDER
}
handle /each {
	edge_limit {
		in_flight each 1 {
			key client
		}
	}
	reverse_proxy HOLDER
}
handle /small {
	edge_limit {
		ceiling small 8/h
	}
	respond ok
}
handle /parts {
	edge_limit {
		ceiling parts_bound 1000000/s
		limit parts 2/h {
			key {query.a} {query.b}
		}
	}
	respond ok
}
handle /unresolved {
	edge_limit {
		client {
			trusted_proxies static 127.0.0.0/8
			hops 1
		}
		limit unresolved_too 3/h
	}
	respond ok
}
handle /observe {
	edge_limit {
		limit observed 2/h {
			observe
		}
	}
	respond ok
}
handle /forgive {
	edge_limit {
		limit forgiven 3/h {
			ban 1h
		}
	}
	respond ok
}
handle /headers {
	edge_limit {
		ratelimit_headers ietf
		limit told 3/h
	}
	respond ok
}
handle /numbers {
	edge_limit {
		limit numbers NUMBERS
	}
	respond ok
}
handle /kept {
	edge_limit {
		limit kept 3/h
	}
	respond ok
}`

func (s *storeUnderTest) sites(numbers string) func(addr string) string {
	return func(addr string) string {
		return site(addr, strings.NewReplacer("HOLDER", s.app.addr, "NUMBERS", numbers).Replace(scenarioSites))
	}
}

// get sends a visitor's request to the next instance.
func (s *storeUnderTest) get(t *testing.T, visitor int, path string, headers ...string) answer {
	t.Helper()
	return get(t, s.visitor(t, visitor), s.url(path), headers...)
}

// want sends requests one after the other and checks their statuses.
func (s *storeUnderTest) want(t *testing.T, visitor int, path string, statuses ...int) (last answer) {
	t.Helper()
	for n, status := range statuses {
		if last = s.get(t, visitor, path); last.status != status {
			t.Fatalf("request %d of %d to %s by visitor %d: status %d, want %d (%s)", n+1, len(statuses), path, visitor, last.status, status, last.body)
		}
	}
	return last
}

// eventually polls until a visitor's request has a status.
func (s *storeUnderTest) eventually(t *testing.T, visitor int, path string, status int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s answers %d", path, status), func() bool { return s.get(t, visitor, path).status == status })
}

// passesAfter sends requests until one passes, and wants none denied that was
// sent later than wait after told. An instance that asked the store in between
// counts the rest of the wait from when the answer came: so it may deny for
// longer, by no more than the longest of these requests took.
func (s *storeUnderTest) passesAfter(t *testing.T, visitor int, path string, told time.Time, wait time.Duration) {
	t.Helper()
	var onTheWay time.Duration
	for {
		sent := time.Now()
		if s.get(t, visitor, path).status == ok {
			return
		}
		if late := sent.Sub(told) - wait; late > onTheWay {
			t.Fatalf("denied %v after a wait of %v was over; no answer took longer than %v", late, wait, onTheWay)
		}
		onTheWay = max(onTheWay, time.Since(sent))
		time.Sleep(5 * time.Millisecond)
	}
}

func retryAfter(t *testing.T, a answer) int {
	t.Helper()
	seconds, err := strconv.Atoi(a.header.Get("Retry-After"))
	if err != nil {
		t.Fatalf("Retry-After %q", a.header.Get("Retry-After"))
	}
	return seconds
}

const ok, denied = http.StatusOK, http.StatusTooManyRequests

// storeScenarios are what budgets promise, wherever they are kept. Requests go
// to the instances in turn.
var storeScenarios = []struct {
	name string
	run  func(t *testing.T, s *storeUnderTest)
}{
	{"a burst, exactly, and of each client", func(t *testing.T, s *storeUnderTest) {
		for visitor := range 3 {
			a := s.want(t, visitor, "/burst", ok, ok, ok, ok, ok, denied, denied, denied)
			if wait := retryAfter(t, a); wait < 600 || wait > 720 {
				t.Errorf("Retry-After %d, one more comes after 720 s", wait)
			}
		}
	}},
	{"a refill, after the Retry-After and not before", func(t *testing.T, s *storeUnderTest) {
		begin := time.Now()
		var a answer
		for a.status != denied { // a slow machine may refill meanwhile
			a = s.get(t, 0, "/refill")
			if time.Since(begin) > patience {
				t.Fatal("two a second could not be used up")
			}
		}
		told := time.Now()
		s.passesAfter(t, 0, "/refill", told, time.Duration(retryAfter(t, a))*time.Second)
		// two at first and one each second
		if took := time.Since(begin); took < time.Second {
			t.Errorf("three of a budget of two, and one more each second, within %v", took)
		}
	}},
	{"what a request costs", func(t *testing.T, s *storeUnderTest) {
		s.want(t, 0, "/cost?n=4", ok, ok, denied)
		s.want(t, 0, "/cost?n=2", ok)
		s.want(t, 0, "/cost?n=1", denied)
	}},
	{"what costs more than the burst never passes, and uses nothing up", func(t *testing.T, s *storeUnderTest) {
		if a := s.want(t, 1, "/cost?n=11", denied, denied); a.header.Get("Retry-After") != "" {
			t.Errorf("Retry-After %q for what never passes", a.header.Get("Retry-After"))
		}
		s.want(t, 1, "/cost?n=10", ok)
	}},
	{"a ban", func(t *testing.T, s *storeUnderTest) {
		a := s.want(t, 0, "/ban", ok, ok, denied, denied, denied)
		if wait := retryAfter(t, a); wait < 3000 || wait > 3600 {
			t.Errorf("Retry-After %d, the ban is 3600 s", wait)
		}
		for _, c := range s.caddys {
			if k := c.key(t, http.MethodPost, "ban", `{"client": "`+visitorIP(0)+`"}`); k.BannedFor < 3000 || k.BannedFor > 3600 {
				t.Errorf("an instance knows of a ban of %v s", k.BannedFor)
			}
		}
		s.want(t, 1, "/ban", ok)
	}},
	{"a ban ends, and attempts do not lengthen it", func(t *testing.T, s *storeUnderTest) {
		var sent, told time.Time
		for status := 0; status != denied; {
			sent = time.Now()
			status = s.get(t, 0, "/banned_shortly").status
			told = time.Now()
		}
		s.passesAfter(t, 0, "/banned_shortly", told, 2*time.Second)
		if took := time.Since(sent); took < 2*time.Second {
			t.Errorf("the ban of 2 s ended within %v", took)
		}
	}},
	{"attempts lengthen a ban that extends", func(t *testing.T, s *storeUnderTest) {
		s.want(t, 0, "/extend", ok, ok, denied)
		begin := time.Now()
		for time.Since(begin) < 2100*time.Millisecond { // a ban from the first would have 597 s left
			a := s.want(t, 0, "/extend", denied)
			if wait := retryAfter(t, a); wait != 600 {
				t.Fatalf("Retry-After %d, %v after the first denial", wait, time.Since(begin))
			}
			time.Sleep(50 * time.Millisecond)
		}
		for _, c := range s.caddys { // the store is asked once a second at least
			if k := c.key(t, http.MethodPost, "extend", `{"client": "`+visitorIP(0)+`"}`); k.BannedFor < 598 || k.BannedFor > 600 {
				t.Errorf("an instance knows of a ban of %v s", k.BannedFor)
			}
		}
	}},
	{"on_status keeps what was wrong and gives back the rest", func(t *testing.T, s *storeUnderTest) {
		s.want(t, 0, "/login?status=200", ok, ok, ok, ok, ok, ok, ok, ok, ok)
		s.want(t, 0, "/login?status=401", 401, 401)
		s.want(t, 0, "/login?status=200", ok, ok, ok, ok, ok)
		s.want(t, 0, "/login?status=401", 401, denied)
		s.want(t, 0, "/login?status=200", denied)
		s.want(t, 1, "/login?status=200", ok)
	}},
	{"on_status late charges with the response", func(t *testing.T, s *storeUnderTest) {
		s.want(t, 0, "/late?status=200", ok, ok, ok, ok, ok)
		s.want(t, 0, "/late?status=401", 401, 401, 401, denied)
		s.want(t, 0, "/late?status=200", denied)
	}},
	{"all or nothing, over limits and a ceiling", func(t *testing.T, s *storeUnderTest) {
		// Permits of a ceiling lie at one instance for a while, so this one is asked
		// alone.
		one := &storeUnderTest{fleet: &fleet{caddys: s.caddys[:1], addrs: s.addrs[:1]}}
		one.want(t, 0, "/together?name=x", ok, ok, denied, denied, denied)
		one.want(t, 1, "/together?name=x", ok)
		left := func(limit, parts string) int64 { return s.caddys[0].key(t, http.MethodPost, limit, parts).Remaining }
		if n := left("together_name", `{"{http.request.uri.query.name}": "x"}`); n != 2 {
			t.Errorf("%d are left of five after three: what was denied by the client's limit was charged by another", n)
		}
		one.want(t, 2, "/together?name=x", ok)
		one.want(t, 2, "/together?name=x", http.StatusServiceUnavailable, http.StatusServiceUnavailable)
		one.want(t, 3, "/together?name=y", http.StatusServiceUnavailable)
		eventually(t, "a denial by the ceiling charges nothing", func() bool {
			return left("together_client", `{"client": "`+visitorIP(2)+`"}`) == 1 && left("together_name", `{"{http.request.uri.query.name}": "x"}`) == 1 &&
				left("together_client", `{"client": "`+visitorIP(3)+`"}`) == 2
		})
	}},
	{"a ceiling of few requests, of which no instance keeps what it does not need", func(t *testing.T, s *storeUnderTest) {
		passed := 0
		for range 4 { // in quick succession, as if many more were to come
			get(t, s.visitor(t, 0), "http://"+s.addrs[0]+"/small").wantStatus(t, ok)
			passed++
		}
		last := "http://" + s.addrs[len(s.addrs)-1] + "/small"
		eventually(t, "another instance gets the rest", func() bool {
			if get(t, s.visitor(t, 0), last).status == ok {
				passed++
			}
			return passed == 8
		})
		for range 5 {
			s.want(t, 0, "/small", http.StatusServiceUnavailable)
		}
	}},
	{"requests at the same time, and their end", func(t *testing.T, s *storeUnderTest) {
		s.hold(t, "/at_once", http.StatusServiceUnavailable, []int{0, 1}, []int{0, 2})
	}},
	{"requests of each client at the same time, and their end", func(t *testing.T, s *storeUnderTest) {
		s.hold(t, "/each", denied, []int{0, 1, 2}, []int{0, 1, 2})
	}},
	{"keys of several parts", func(t *testing.T, s *storeUnderTest) {
		s.want(t, 0, "/parts?a=x&b=yz", ok, ok, denied)
		s.want(t, 0, "/parts?a=xy&b=z", ok, ok, denied)
		s.want(t, 0, "/parts?a=&b=xyz", ok, ok, denied)
		s.want(t, 1, "/parts?a=x&b=yz", denied)
	}},
	{"who cannot be resolved shares a budget", func(t *testing.T, s *storeUnderTest) {
		s.want(t, 0, "/unresolved", ok)
		s.want(t, 1, "/unresolved", ok)
		s.want(t, 2, "/unresolved", ok, denied)
		s.want(t, 0, "/unresolved", denied)
		if a := s.get(t, 0, "/unresolved", "X-Forwarded-For: 203.0.113.7"); a.status != ok {
			t.Errorf("a client that is resolved got %d", a.status)
		}
	}},
	{"what is observed denies nothing, and is counted", func(t *testing.T, s *storeUnderTest) {
		s.want(t, 0, "/observe", ok, ok, ok, ok, ok)
		if n := s.sum(t, `caddy_edge_limit_requests_total{name="observed",outcome="would_deny"}`); n != 3 {
			t.Errorf("%v would have been denied, want 3", n)
		}
	}},
	{"a key is looked up and forgiven", func(t *testing.T, s *storeUnderTest) {
		parts := `{"client": "` + visitorIP(0) + `"}`
		last := s.caddys[len(s.caddys)-1]
		s.want(t, 0, "/forgive", ok)
		for _, c := range s.caddys {
			if k := c.key(t, http.MethodPost, "forgiven", parts); k.Remaining != 2 || k.RetryAfter != 0 || k.BannedFor != 0 || k.Forgiven {
				t.Errorf("after one of three: %+v", k)
			}
		}
		s.want(t, 0, "/forgive", ok, ok, denied, denied)
		for _, c := range s.caddys {
			if k := c.key(t, http.MethodPost, "forgiven", parts); k.Remaining != 0 || k.RetryAfter < 3000 || k.BannedFor < 3000 {
				t.Errorf("after all of three: %+v", k)
			}
		}
		if k := last.key(t, http.MethodDelete, "forgiven", parts); !k.Forgiven || k.Remaining != 3 || k.BannedFor != 0 {
			t.Errorf("forgiven: %+v", k)
		}
		if k := last.key(t, http.MethodDelete, "forgiven", parts); k.Forgiven {
			t.Errorf("forgiven again, though there was nothing: %+v", k)
		}
		get(t, s.visitor(t, 0), "http://"+s.addrs[len(s.addrs)-1]+"/forgive").wantStatus(t, ok)
		for _, addr := range s.addrs { // others believe their last denial for a second
			eventually(t, "a client that was forgiven passes", func() bool {
				return get(t, s.visitor(t, 0), "http://"+addr+"/forgive").status == ok
			})
		}
	}},
	{"what responses tell", func(t *testing.T, s *storeUnderTest) {
		for n, want := range []string{`"told";r=2;t=`, `"told";r=1;t=`, `"told";r=0;t=`, `"told";r=0;t=`} {
			a := s.get(t, 0, "/headers")
			if got := a.header.Get("RateLimit"); !strings.HasPrefix(got, want) {
				t.Errorf("answer %d: RateLimit %s, want %s", n, got, want)
			}
		}
	}},
	{"other numbers keep the share that was used, and a reload keeps the rest", func(t *testing.T, s *storeUnderTest) {
		s.want(t, 0, "/kept", ok, ok, ok, denied)
		s.want(t, 1, "/kept", ok)
		s.want(t, 0, "/numbers", ok, ok)
		s.want(t, 1, "/numbers", ok, ok, ok, ok, denied)
		s.load(t, s.globals, s.sites("8/h"))
		again := func(visitor int, path string, statuses ...int) {
			t.Helper()
			for n, status := range statuses {
				if a := getAgain(t, s.visitor(t, visitor), s.url(path)); a.status != status {
					t.Errorf("after the reload, request %d to %s by visitor %d: %d, want %d", n+1, path, visitor, a.status, status)
				}
			}
		}
		again(0, "/numbers", ok, ok, ok, ok, denied) // half was used
		again(1, "/numbers", denied)                 // all was used
		again(0, "/kept", denied)
		again(1, "/kept", ok, ok, denied)
	}},
}

func (a answer) wantStatus(t *testing.T, status int) {
	t.Helper()
	if a.status != status {
		t.Errorf("status %d, want %d: %s", a.status, status, a.body)
	}
}

// hold has requests of these visitors in flight. Those of full are denied then,
// and pass when the others have ended.
func (s *storeUnderTest) hold(t *testing.T, path string, status int, visitors, full []int) {
	t.Helper()
	var held sync.WaitGroup
	release := make(map[int]string)
	for _, visitor := range visitors {
		release[visitor] = strconv.Itoa(visitor) + path
		url := s.url(path + "?" + release[visitor])
		held.Go(func() {
			response, err := s.visitor(t, visitor).RoundTrip(request(t, url))
			if err != nil || response.StatusCode != ok {
				t.Errorf("a request that was held: %v", err)
				return
			}
			response.Body.Close()
		})
		if name := <-s.app.arrived; name != release[visitor] {
			t.Fatalf("%s arrived", name)
		}
	}
	for range 2 {
		for _, visitor := range full {
			s.want(t, visitor, path+"?full", status)
		}
	}
	close(s.app.gate("full")) // nobody may have to wait there
	for _, visitor := range visitors {
		close(s.app.gate(release[visitor]))
	}
	held.Wait()
	for _, visitor := range full {
		s.eventually(t, visitor, path+"?full", ok)
	}
	s.app.mu.Lock()
	delete(s.app.release, "full")
	s.app.mu.Unlock()
	for len(s.app.arrived) > 0 {
		<-s.app.arrived
	}
}

// The same scenarios hold in the memory of one instance, and for two that share
// a store, whatever kind of server that is.
func TestStores(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	// The scenarios are about numbers: on a busy machine no request may be decided
	// without the store.
	const patient = "timeout 5s"
	for _, row := range []struct {
		name      string
		instances int
		globals   func(t *testing.T) (globals string, servers []*redis)
	}{
		{"memory", 1, func(*testing.T) (string, []*redis) { return fleetOptions("store memory"), nil }},
		{"one server", 2, func(t *testing.T) (string, []*redis) {
			r := startRedis(t)
			return storeOptions("address "+r.addr, patient), []*redis{r}
		}},
		{"TLS, an ACL user, a database and a prefix", 2, func(t *testing.T) (string, []*redis) {
			r, ca := startTLSRedis(t, "requirepass the-admins", scriptUser("limiter", "secret", "shop"))
			return storeOptions("address localhost:"+portOf(r.addr), "username limiter", "password secret", "tls "+ca, "database 3", "prefix shop", patient), []*redis{r}
		}},
		{"Sentinels", 2, func(t *testing.T) (string, []*redis) {
			s := startSentinels(t)
			return storeOptions("address "+strings.Join(s.addresses(), " "), "master_name "+masterName, patient), s.servers[:1]
		}},
		{"a cluster", 2, func(t *testing.T) (string, []*redis) {
			c := startCluster(t)
			return storeOptions("address "+strings.Join(c.addresses(), " "), patient), c.nodes
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			globals, servers := row.globals(t)
			s := &storeUnderTest{globals: globals, app: startHolder(t)}
			s.fleet = startFleet(t, row.instances, globals, s.sites("4/h"))
			if servers != nil {
				s.awaitState(t, "connected")
			}
			for _, scenario := range storeScenarios {
				t.Run(scenario.name, func(t *testing.T) { scenario.run(t, s) })
			}
			if servers == nil {
				return
			}
			for _, kind := range []string{"timeout", "network", "stale", "overload", "other", "garbage"} {
				if n := s.sum(t, `caddy_edge_limit_store_errors_total{kind="`+kind+`"}`); n != 0 {
					t.Errorf("%v errors of the kind %s", n, kind)
				}
			}
			s.checkKeys(t, servers)
		})
	}
}

// checkKeys sees to it that all that lies in the store bears the prefix, ends by
// itself, and tells nobody's address.
func (s *storeUnderTest) checkKeys(t *testing.T, servers []*redis) {
	t.Helper()
	prefix, database := "edge_limit:", "0"
	if strings.Contains(s.globals, "prefix shop") {
		prefix, database = "shop:", "3"
	}
	var keys []string
	for _, server := range servers {
		conn, err := server.dial()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		do := func(args ...string) any {
			answer, err := conn.do(args...)
			if err != nil {
				t.Fatalf("%s: %v", strings.Join(args, " "), err)
			}
			return answer
		}
		if database != "0" {
			do("SELECT", database)
		}
		found, _ := do("KEYS", "*").([]any)
		for _, name := range found {
			key := fmt.Sprint(name)
			keys = append(keys, key)
			if do("PTTL", key) == int64(-1) { // 0 is its last millisecond, -2 that it has ended meanwhile
				t.Errorf("%s never ends", key)
			}
			var value any
			switch do("TYPE", key) {
			case "string":
				value = do("GET", key)
			case "zset":
				value = do("ZRANGE", key, "0", "-1", "WITHSCORES")
			case "hash":
				value = do("HGETALL", key)
			}
			text := key + fmt.Sprint(value)
			if !strings.HasPrefix(key, prefix) || strings.Contains(text, "127.0.1.") || strings.Contains(text, fleetPepper) {
				t.Errorf("the store holds %s", text)
			}
		}
	}
	kinds := func(kind string) bool {
		return slices.ContainsFunc(keys, func(key string) bool { return strings.HasPrefix(key, prefix+kind) })
	}
	if len(keys) < 10 || !kinds("l:") || !kinds("c:") || !kinds("{fleet}:") {
		t.Errorf("too few keys to mean something: %q", keys)
	}
}
