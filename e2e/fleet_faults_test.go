package e2e

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	faultClients = 4
	faultBurst   = 10
	faultRate    = 10
	faultTime    = 1200 * time.Millisecond
	recoveryTime = 5 * time.Second // after which everything is exact again
	storeTimeout = 50 * time.Millisecond
)

// trial is a fleet under load while something happens to its store. Each client
// has a companion who visits a page that edge_limit has nothing to do with: what
// it sees is what the machine does to everybody.
type trial struct {
	*fleet
	begin time.Time

	stop              chan struct{}
	clients, controls [faultClients]load
}

// startTrial runs two instances under load from here on. If states are named, the
// store is in one of these before.
func startTrial(t *testing.T, globals string, states ...string) *trial {
	t.Helper()
	needLoopbackNetwork(t)
	tr := &trial{stop: make(chan struct{})}
	tr.fleet = startFleet(t, 2, globals, func(addr string) string {
		return site(addr, `
			handle /limited {
				edge_limit {
					limit per_client 10/s
				}
				respond ok
			}
			respond plain`)
	})
	tr.awaitState(t, states...)
	for _, c := range tr.caddys { // the first one has to learn of the second
		eventually(t, "instances know how many there are", func() bool { return c.store(t).Instances == len(tr.caddys) })
	}
	tr.begin = time.Now()
	for n := range faultClients {
		client, control := clientFrom(t, visitorIP(n)), clientFrom(t, visitorIP(n))
		url := func(path string) func(int) string {
			return func(request int) string { return "http://" + tr.addrs[(n+request)%len(tr.addrs)] + path }
		}
		tr.clients[n].run(client, 25*time.Millisecond, tr.stop, url("/limited"))
		tr.controls[n].run(control, 25*time.Millisecond, tr.stop, url("/plain"))
	}
	return tr
}

// recover waits until the store is in use again, for a while more, and ends the
// load. It returns when that was.
func (tr *trial) recover(t *testing.T) (recovered time.Time) {
	t.Helper()
	mended := time.Now()
	tr.awaitState(t, "connected")
	if took := time.Since(mended); took > recoveryTime {
		t.Errorf("the store was in use %v after it could be", took)
	}
	recovered = time.Now()
	time.Sleep(2 * time.Second)
	tr.end()
	return recovered
}

func (tr *trial) end() {
	close(tr.stop)
	for n := range tr.clients {
		tr.clients[n].wait()
		tr.controls[n].wait()
	}
}

// check holds the whole run against what is promised: no failure, no delay beyond
// the timeout that the machine did not cause, and for each client
//
//	admitted <= burst * (1 + losses + fallbacks) + rate * T
//
// where the store has lost its state so many times, and so many times instances
// had to fall back on their shares, which together are one budget more. After
// recovered all is exact again.
func (tr *trial) check(t *testing.T, losses, fallbacks float64, recovered time.Time) {
	t.Helper()
	late, lateControls, requests := 0, 0, 0
	var worst time.Duration
	most, least := 0.0, 2.0
	for n := range tr.clients {
		visits, controls := tr.clients[n].visits, tr.controls[n].visits
		noFailures(t, visits, denied)
		noFailures(t, controls)
		for _, v := range visits {
			if took := v.done.Sub(v.sent); took > storeTimeout+50*time.Millisecond {
				late++
				worst = max(worst, took)
			}
		}
		for _, v := range controls {
			if v.done.Sub(v.sent) > storeTimeout+50*time.Millisecond {
				lateControls++
			}
		}
		requests += len(visits)
		longest, _ := spans(visits)
		got, bound := float64(len(admitted(visits))), faultBurst*(1+losses+fallbacks)+faultRate*longest.Seconds()
		if got > bound {
			t.Errorf("client %d: %v admitted, at most %.1f may be", n, got, bound)
		}
		most = max(most, got/bound)

		var after []visit
		for _, v := range visits {
			if v.sent.After(recovered) {
				after = append(after, v)
			}
		}
		longest, shortest := spans(after)
		got = float64(len(admitted(after)))
		if bound, due := faultBurst+faultRate*longest.Seconds(), faultRate*shortest.Seconds(); got > bound || got < 0.95*due-1 {
			t.Errorf("client %d: %v admitted in %v after the recovery, at most %.1f may be and %.1f are due", n, got, longest, bound, due)
		} else {
			least = min(least, got/due)
		}
	}
	t.Logf("%d requests, %d of them late (worst %v), of as many control requests %d; at most %.1f %% of the bound admitted; after the recovery at least %.1f %% of what was due",
		requests, late, worst.Round(time.Millisecond), lateControls, 100*most, 100*least)
	if late > lateControls+requests/100 { // the machine does not treat both alike to the last one
		t.Errorf("%d of %d requests were late, of as many that have nothing to do with the store %d", late, requests, lateControls)
	}
	for i, c := range tr.caddys {
		if n := c.output.linesWith(`"logger":"edge_limit"`, "the store"); n > 12 {
			t.Errorf("instance %d wrote %d lines about the store", i, n)
		}
	}
}

// Nobody waits for a store that hangs, is gone, comes back empty or forgets its
// scripts, and as soon as it is back it is what counts.
func TestFleetFaults(t *testing.T) {
	for _, row := range []struct {
		name   string
		lines  []string
		losses float64
		harm   func(t *testing.T, r *redis)
		mend   func(t *testing.T, r *redis)
	}{
		{"a server that hangs", nil, 0,
			func(t *testing.T, r *redis) { r.signal(t, syscall.SIGSTOP) },
			func(t *testing.T, r *redis) { r.signal(t, syscall.SIGCONT) }},
		{"a server that dies, and comes back empty", nil, 1,
			func(t *testing.T, r *redis) { r.kill(t) },
			func(t *testing.T, r *redis) { r.start(t) }},
		{"a server that dies, and has written all down", []string{"appendonly yes", "appendfsync always"}, 0,
			func(t *testing.T, r *redis) { r.kill(t) },
			func(t *testing.T, r *redis) { r.start(t) }},
		{"a server that is paused", nil, 0,
			func(t *testing.T, r *redis) {
				r.must(t, "CLIENT", "PAUSE", strconv.FormatInt(faultTime.Milliseconds(), 10), "ALL")
			},
			func(*testing.T, *redis) {}},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := startRedis(t, row.lines...)
			tr := startTrial(t, storeOptions("address "+r.addr), "connected")
			time.Sleep(700 * time.Millisecond)
			row.harm(t, r)
			time.Sleep(faultTime)
			row.mend(t, r)
			recovered := tr.recover(t)
			tr.check(t, row.losses, 1, recovered)
			for i, c := range tr.caddys {
				if c.output.linesWith("the store cannot be used") == 0 {
					t.Errorf("instance %d did not notice: the fault was none", i)
				}
			}
		})
	}
}

// A server may forget its scripts at any moment: nothing is charged twice for it,
// and nothing is missed.
func TestFleetScriptsForgotten(t *testing.T) {
	r := startRedis(t)
	tr := startTrial(t, storeOptions("address "+r.addr, "timeout 5s"), "connected")
	flushes := 0
	for begin := time.Now(); time.Since(begin) < 3*time.Second; flushes++ {
		r.must(t, "SCRIPT", "FLUSH")
		time.Sleep(5 * time.Millisecond)
	}
	tr.end()
	t.Logf("%d times", flushes)
	tr.check(t, 0, 0, tr.begin)
	tr.awaitState(t, "connected")
	for i, c := range tr.caddys {
		if n := c.output.linesWith("the store cannot be used"); n != 0 {
			t.Errorf("instance %d gave the store up", i)
		}
	}
}

// A fleet starts, serves and reloads without its store, and uses it when it is
// there.
func TestFleetStoreAbsentAtStart(t *testing.T) {
	r := newRedis(t)
	tool(t, "redis-server")
	globals := storeOptions("address "+r.addr, "fleet 2")
	tr := startTrial(t, globals, "network", "connecting", "timeout")
	time.Sleep(faultTime)
	r.start(t)
	recovered := tr.recover(t)
	tr.check(t, 0, 1, recovered)
}

// A failover to a replica may lose the last charges, and nothing else.
func TestFleetSentinelFailover(t *testing.T) {
	s := startSentinels(t)
	tr := startTrial(t, storeOptions("address "+strings.Join(s.addresses(), " "), "master_name "+masterName), "connected")
	time.Sleep(700 * time.Millisecond)
	s.servers[0].kill(t)
	begin := time.Now()
	s.awaitMaster(t, s.servers[0].addr)
	t.Logf("another master after %v", time.Since(begin).Round(time.Millisecond))
	recovered := tr.recover(t)
	tr.check(t, 1, 1, recovered)
	if got := s.servers[1].connections(t); got == 0 {
		t.Error("nobody is connected to the new master")
	}
}

// Of a cluster that has lost a node the rest goes on, and keys of that node are
// counted by shares.
func TestFleetClusterNodeLost(t *testing.T) {
	for _, row := range []struct {
		name string
		lost func(t *testing.T, c *cluster) *redis
	}{
		{"with our own keys", func(t *testing.T, c *cluster) *redis { has, _ := c.ofSlot(t, "{fleet}"); return has }},
		{"another", func(t *testing.T, c *cluster) *redis { _, hasNot := c.ofSlot(t, "{fleet}"); return hasNot }},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel() // with each other
			c := startCluster(t)
			tr := startTrial(t, storeOptions("address "+strings.Join(c.addresses(), " ")), "connected")
			time.Sleep(700 * time.Millisecond)
			lost := row.lost(t, c)
			lost.kill(t)
			time.Sleep(2 * faultTime) // the others notice after a second
			lost.start(t)
			c.awaitWhole(t)
			tr.recover(t)
			// Calls that fail again and again make instances leave the store alone for a
			// while each time.
			fallbacks := 1
			for _, c := range tr.caddys {
				fallbacks = max(fallbacks, c.output.linesWith("the store cannot be used"))
			}
			t.Logf("instances left the store alone %d times", fallbacks)
			// a node whose keys nobody but requests ask for is found again by these
			tr.check(t, 1, float64(fallbacks), time.Now().Add(-1500*time.Millisecond))
		})
	}
}

// What a full server does depends on its policy, and an operator is told of all
// that would harm.
func TestFleetMemoryFull(t *testing.T) {
	needLoopbackNetwork(t)
	t.Parallel()
	for _, row := range []struct {
		policy string
		warns  bool
		full   func(t *testing.T, f *fleet, r *redis)
	}{
		{"noeviction", true, func(t *testing.T, f *fleet, r *redis) {
			r.must(t, "CONFIG", "SET", "maxmemory", "1") // what was freed meanwhile is not to be used
			f.awaitState(t, "out_of_memory")
			for _, want := range []int{ok, ok, denied} { // its share, without the store
				get(t, clientFrom(t, visitorIP(1)), "http://"+f.addrs[0]).wantStatus(t, want)
			}
			get(t, clientFrom(t, visitorIP(0)), f.url("/")).wantStatus(t, denied) // what is known stays
			r.must(t, "CONFIG", "SET", "maxmemory", "100mb")
			begin := time.Now()
			f.awaitState(t, "connected")
			if took := time.Since(begin); took > recoveryTime {
				t.Errorf("the store was in use %v after it could be", took)
			}
			get(t, clientFrom(t, visitorIP(2)), f.url("/")).wantStatus(t, ok)
		}},
		{"allkeys-lru", true, func(t *testing.T, f *fleet, r *redis) {
			f.awaitState(t, "connected")
			get(t, clientFrom(t, visitorIP(1)), f.url("/")).wantStatus(t, ok)
			// Who was over his limit may be forgotten, which is what the warning is about.
			t.Logf("who was over his limit gets %d", get(t, clientFrom(t, visitorIP(0)), f.url("/")).status)
		}},
		{"volatile-ttl", false, func(t *testing.T, f *fleet, r *redis) {
			f.awaitState(t, "connected")
			get(t, clientFrom(t, visitorIP(1)), f.url("/")).wantStatus(t, ok)
			for range 2 * len(f.addrs) {
				get(t, clientFrom(t, visitorIP(0)), f.url("/")).wantStatus(t, denied)
			}
		}},
	} {
		t.Run(row.policy, func(t *testing.T) {
			t.Parallel()
			r := startRedis(t, "maxmemory 6mb", "maxmemory-policy "+row.policy)
			// timeout: a full server takes its time to find what to evict
			f := startFleet(t, 2, storeOptions("address "+r.addr, "timeout 5s"), func(addr string) string {
				return site(addr, "edge_limit {\nlimit per_client 4/h\n}\nrespond ok")
			})
			f.awaitState(t, "connected")
			for _, want := range []int{ok, ok, ok, ok, denied, denied} {
				get(t, clientFrom(t, visitorIP(0)), f.url("/")).wantStatus(t, want)
			}
			time.Sleep(1100 * time.Millisecond) // instances ask again who was denied a second ago
			fillUp(t, r, row.policy == "noeviction")
			row.full(t, f, r)
			for i, c := range f.caddys {
				if warns := c.output.linesWith("maxmemory-policy is "+row.policy) > 0; warns != row.warns {
					t.Errorf("instance %d warns of the policy: %t", i, warns)
				}
			}
		})
	}
}

// fillUp fills the server with keys as those of clients who have used a little.
func fillUp(t *testing.T, r *redis, untilRefused bool) {
	t.Helper()
	conn, err := r.dial()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	value := strings.Repeat("7", 400)
	for n := range 20_000 {
		_, err := conn.do("SET", fmt.Sprintf("edge_limit:l:{%032x}", n), value, "PX", "90000")
		if err != nil {
			if !untilRefused || !strings.HasPrefix(err.Error(), "OOM") {
				t.Fatal(err)
			}
			return
		}
	}
	if untilRefused {
		t.Fatal("the server is not full")
	}
	evicted := r.text(t, "INFO", "stats")
	if strings.Contains(evicted, "evicted_keys:0\r") {
		t.Fatal("the server evicted nothing")
	}
}
