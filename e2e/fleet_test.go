package e2e

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// visit is one request of a load, and what became of it.
type visit struct {
	sent, done time.Time
	status     int   // 0: no answer
	stamp      int64 // when the instance had admitted it, in Unix milliseconds; 0: it said nothing
	err        error
}

// load sends a visitor's requests evenly, without waiting for answers, until
// stop is closed. url is asked where each goes to.
type load struct {
	mu     sync.Mutex
	visits []visit
	all    sync.WaitGroup
}

func (l *load) run(via http.RoundTripper, pause time.Duration, stop <-chan struct{}, url func(n int) string) {
	l.all.Go(func() {
		ticker := time.NewTicker(pause)
		defer ticker.Stop()
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			case <-ticker.C:
			}
			l.all.Go(func() { l.add(visitOnce(via, url(n))) })
		}
	})
}

func (l *load) add(v visit) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.visits = append(l.visits, v)
}

// wait returns all visits, in the order they were sent, once there are no more.
func (l *load) wait() []visit {
	l.all.Wait()
	slices.SortFunc(l.visits, func(a, b visit) int { return a.sent.Compare(b.sent) })
	return l.visits
}

func visitOnce(via http.RoundTripper, url string) visit {
	v := visit{sent: time.Now()}
	var response *http.Response
	response, v.err = (&http.Client{Transport: via, Timeout: patience}).Get(url)
	if v.err == nil {
		v.status = response.StatusCode
		v.stamp, _ = strconv.ParseInt(response.Header.Get("X-Admitted"), 10, 64)
		_, _ = io.Copy(io.Discard, response.Body)
		response.Body.Close()
	}
	v.done = time.Now()
	return v
}

// admitted are the visits that passed.
func admitted(visits []visit) (passed []visit) {
	for _, v := range visits {
		if v.status == http.StatusOK {
			passed = append(passed, v)
		}
	}
	return passed
}

// spans are the longest and the shortest time in which the decisions on these
// visits can have been made: a decision lies between a request and its answer.
func spans(visits []visit) (longest, shortest time.Duration) {
	firstDone, lastDone := visits[0].done, visits[0].done
	for _, v := range visits {
		if v.done.Before(firstDone) {
			firstDone = v.done
		}
		if v.done.After(lastDone) {
			lastDone = v.done
		}
	}
	return lastDone.Sub(visits[0].sent), max(0, visits[len(visits)-1].sent.Sub(firstDone))
}

// noFailures sees to it that every request was answered, and with nothing but 200
// and these.
func noFailures(t *testing.T, visits []visit, statuses ...int) {
	t.Helper()
	wrong := make(map[string]int)
	for _, v := range visits {
		if v.err != nil {
			wrong[v.err.Error()]++
		} else if v.status != http.StatusOK && !slices.Contains(statuses, v.status) {
			wrong[strconv.Itoa(v.status)]++
		}
	}
	for what, n := range wrong {
		t.Errorf("%d of %d requests got %s", n, len(visits), what)
	}
}

// Four instances are one to each of their clients: they admit what one would,
// and waste nothing.
func TestFleetIsExact(t *testing.T) {
	needLoopbackNetwork(t)
	const clients, burst, rate, duration = 20, 10, 10, 6 * time.Second
	r := startRedis(t)
	// the store is always asked: on a busy machine an answer may take long
	f := startFleet(t, 4, storeOptions("address "+r.addr, "timeout 5s"), func(addr string) string {
		return site(addr, "edge_limit {\nlimit per_client 10/s\n}\nrespond ok")
	})
	f.awaitState(t, "connected")
	stop := make(chan struct{})
	loads := make([]load, clients)
	for n := range loads {
		loads[n].run(clientFrom(t, visitorIP(n)), 40*time.Millisecond, stop, func(request int) string {
			return "http://" + f.addrs[(n+request)%len(f.addrs)]
		})
	}
	time.Sleep(duration)
	close(stop)
	total, least, most := 0, 2.0, 0.0
	for n := range loads {
		visits := loads[n].wait()
		noFailures(t, visits, denied)
		longest, shortest := spans(visits)
		got := float64(len(admitted(visits)))
		bound := burst + rate*longest.Seconds()
		due := burst + rate*shortest.Seconds()
		if got > bound || got < 0.95*due-1 { // the last one may not have been due yet
			t.Errorf("client %d: %v of %d admitted, at most %.1f may be and %.1f are due", n, got, len(visits), bound, due)
		}
		least, most = min(least, got/due), max(most, got/bound)
		total += len(visits)
	}
	t.Logf("%d requests: of the bound at most %.1f %% were admitted, of what was due at least %.1f %%", total, 100*most, 100*least)
	if total < clients*int(rate*duration.Seconds())*3/2 {
		t.Errorf("%d requests are too few to mean something", total)
	}
}

// A ceiling holds in every window of time over all instances, though these are
// killed and come back: a crash wastes permits, and makes none.
//
// An instance stamps what it has admitted with a header, in a route, where that
// comes after edge_limit. A decision lies somewhere between the request's departure and
// this stamp. So what is counted in a window of time are the requests that left
// after its begin and were stamped before its end: these were certainly admitted
// within it. With the stamp alone a request that waited for the processor after
// its decision would be counted in a window that it does not belong to.
func TestFleetCeilingIsStrict(t *testing.T) {
	needLoopbackNetwork(t)
	const count, window, duration = 200, time.Second, 8 * time.Second
	r := startRedis(t)
	f := startFleet(t, 4, storeOptions("address "+r.addr, "timeout 1s"), func(addr string) string {
		return site(addr, "route {\nedge_limit {\nceiling all 200/s\n}\nheader X-Admitted {time.now.unix_ms}\nrespond ok\n}")
	})
	f.awaitState(t, "connected")
	stop := make(chan struct{})
	var all load
	begin := time.Now()
	for n := range 8 {
		via := clientFrom(t, visitorIP(n))
		all.run(via, 20*time.Millisecond, stop, func(request int) string { return "http://" + f.addrs[(n+request)%len(f.addrs)] })
	}
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	kills := 0
	for time.Since(begin) < duration {
		time.Sleep(time.Duration(200+random.IntN(500)) * time.Millisecond)
		victim := f.caddys[random.IntN(len(f.caddys))]
		if err := victim.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		<-victim.ended
		kills++
		victim.start(t)
	}
	close(stop)
	var passed []visit
	lost, refused := 0, 0
	for _, v := range all.wait() {
		switch {
		case v.err != nil:
			lost++ // its instance was dead, or died over it
		case v.status == http.StatusServiceUnavailable:
			refused++
		case v.status == http.StatusOK && v.stamp > 0:
			passed = append(passed, v)
		default:
			t.Errorf("status %d, stamp %d", v.status, v.stamp)
		}
	}
	worst, stamped := worstWindow(passed, window)
	end := passed[len(passed)-1].sent
	used := float64(len(passed)) / (count * end.Sub(begin).Seconds())
	t.Logf("seed %d: %d kills in %.1f s; %d admitted, %d denied, %d lost with their instance; worst window %d of %d (by the stamps alone %d), %.1f %% of the ceiling used",
		seed, kills, end.Sub(begin).Seconds(), len(passed), refused, lost, worst, count, stamped, 100*used)
	if worst > count {
		t.Errorf("%d were admitted within %v, the ceiling is %d", worst, window, count)
	}
	if used < 0.9 {
		t.Errorf("%.1f %% of the ceiling was used", 100*used)
	}
	if kills < 4 || refused < count {
		t.Errorf("%d kills and %d denials are too few to mean something", kills, refused)
	}
}

// worstWindow is how many were admitted in the worst window: certainly, as
// TestFleetCeilingIsStrict says, and by their stamps alone.
func worstWindow(passed []visit, window time.Duration) (certain, stamped int) {
	for _, first := range passed {
		begin := first.sent.UnixMicro()
		n := 0
		for _, v := range passed {
			if v.sent.UnixMicro() >= begin && (v.stamp+1)*1000 <= begin+window.Microseconds() {
				n++
			}
		}
		certain = max(certain, n)
		n = 0
		for _, v := range passed {
			if v.stamp >= first.stamp && v.stamp < first.stamp+window.Milliseconds() {
				n++
			}
		}
		stamped = max(stamped, n)
	}
	return certain, stamped
}

// A flood costs the store next to nothing: a denied key is denied by the
// instance until its wait is over.
func TestFleetFlood(t *testing.T) {
	needLoopbackNetwork(t)
	const instances, perSecond, workers, duration = 4, 5, 2, 5 * time.Second
	r := startRedis(t)
	f := startFleet(t, instances, storeOptions("address "+r.addr, "timeout 5s"), func(addr string) string {
		return site(addr, "edge_limit {\nlimit per_client 5/s\n}\nrespond ok")
	})
	f.awaitState(t, "connected")
	flood := clientFrom(t, visitorIP(0))
	var requests, passed atomic.Int64
	stop := make(chan struct{})
	var all sync.WaitGroup
	callsBefore, begin := r.scriptCalls(t), time.Now()
	for n := range instances * workers {
		all.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				v := visitOnce(flood, "http://"+f.addrs[n%instances])
				requests.Add(1)
				switch v.status {
				case http.StatusOK:
					passed.Add(1)
				case denied:
				default:
					t.Errorf("status %d, %v", v.status, v.err)
					return
				}
			}
		})
	}
	time.Sleep(duration)
	close(stop)
	all.Wait()
	seconds := time.Since(begin).Seconds()
	calls := float64(r.scriptCalls(t) - callsBefore)
	// An instance shows twice a second at most that it is there. In the moment in
	// which a wait is over, all that are in flight may ask.
	beats := 2 * instances * seconds
	bound := perSecond*instances + float64(instances*workers)
	sent := float64(requests.Load())
	t.Logf("%.0f requests a second, %.0f times the limit: %.1f calls of the store a second, beats included, the bound is %.0f; %.0f times fewer than requests; %d of %.0f admitted",
		sent/seconds, sent/seconds/perSecond, calls/seconds, bound, sent/calls, passed.Load(), 5+perSecond*seconds)
	if calls > bound*seconds+beats {
		t.Errorf("%.1f calls a second, the bound is %.0f", calls/seconds, bound)
	}
	if calls*10 > sent {
		t.Errorf("%.0f calls for %.0f requests", calls, sent)
	}
	if sent < 100*perSecond*seconds && !raceDetector {
		t.Errorf("%.0f requests are no flood at 100 times the limit", sent)
	}
	if got := float64(passed.Load()); got > 5+perSecond*seconds || got < 0.95*perSecond*seconds {
		t.Errorf("%.0f were admitted, at most %.1f may be", got, 5+perSecond*seconds)
	}
}

// Reloads keep the connections, and a change of the store leaves none behind.
func TestFleetReloads(t *testing.T) {
	needLoopbackNetwork(t)
	r := startRedis(t)
	globals := func(prefix string) string { return storeOptions("address "+r.addr, "timeout 5s", "prefix "+prefix) }
	sites := func(n int) func(addr string) string {
		return func(addr string) string {
			return site(addr, "edge_limit {\nlimit per_client 1000/s\nceiling all 1000/s\n}\nrespond "+fmt.Sprint(n))
		}
	}
	f := startFleet(t, 2, globals("a"), sites(0))
	f.awaitState(t, "connected")
	stop := make(chan struct{})
	var all load
	for n := range 4 {
		via := clientFrom(t, visitorIP(n))
		via.DisableKeepAlives = true // Caddy closes those that idle when it reloads
		all.run(via, 20*time.Millisecond, stop, func(request int) string { return "http://" + f.addrs[(n+request)%len(f.addrs)] })
	}
	time.Sleep(300 * time.Millisecond) // all connections that a load needs
	before, most := r.connections(t), 0
	for n := range 20 {
		f.load(t, globals("a"), sites(n+1))
		most = max(most, r.connections(t))
	}
	close(stop)
	failed := 0
	for _, v := range all.wait() { // see getAgain
		if v.status != http.StatusOK {
			failed++
		}
		if v.status >= 400 {
			t.Errorf("status %d", v.status)
		}
	}
	t.Logf("20 reloads of 2 instances: %d connections before, at most %d after; %d requests, %d of them not answered", before, most, len(all.visits), failed)
	if before == 0 || most > before {
		t.Errorf("%d connections became %d", before, most)
	}
	f.load(t, globals("b"), sites(0))
	f.awaitState(t, "connected")
	eventually(t, "the connections of another store end", func() bool { return r.connections(t) <= before })
}
