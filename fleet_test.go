package edgelimit

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

func init() {
	caddy.RegisterModule(testStore{})
}

// testStore is a shared store of one process, with a clock that tests move and
// failures that they order. What a real one does is tested with real ones.
type testStore struct {
	SharedOptions
	Name string `json:"name,omitempty"`
}

func (testStore) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "edge_limit.stores.test", New: func() caddy.Module { return new(testStore) }}
}

func (s *testStore) Shared() *SharedStore {
	conn, _ := testConns.Load(s.Name)
	return &SharedStore{SharedOptions: s.SharedOptions, ID: s.Name, Dial: func(context.Context) (StoreConn, error) {
		c := conn.(*testConn)
		c.dials.Add(1)
		return c, c.failure()
	}}
}

func (s *testStore) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		if d.Val() == "name" {
			d.NextArg()
			s.Name = d.Val()
		} else if known, err := s.UnmarshalOption(d); !known || err != nil {
			return fmt.Errorf("%s: %w", d.Val(), err)
		}
	}
	return nil
}

var testConns sync.Map // by name

// testConn counts debts in whole requests that never decay by themselves: no
// test of this file waits.
type testConn struct {
	dials, beats, takes, backs, leases, renewals atomic.Int64

	mu        sync.Mutex
	err       error
	used      map[StoreKey]time.Duration
	bans      map[StoreKey]time.Duration
	running   map[string]StoreKey
	granted   int64 // of every ceiling together
	lastLease LeaseRequest
	leaseLeft time.Duration
	pulse     Pulse
	warnings  []string
	onTake    func()
}

func (c *testConn) failure() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *testConn) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = err
}

func (c *testConn) Take(_ context.Context, charges []StoreCharge) error {
	c.takes.Add(1)
	if c.onTake != nil {
		c.onTake()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	for i := range charges {
		charge := &charges[i]
		charge.Debt, charge.BanLeft = c.used[charge.Key], c.bans[charge.Key]
		charge.Wait = max(0, charge.Debt+charge.Increment-charge.Tolerance, charge.BanLeft)
		charge.Denied = charge.Wait > 0
		if charge.Key.Kind == StoreInFlight {
			running := 0
			for _, key := range c.running {
				if key == charge.Key {
					running++
				}
			}
			charge.Denied = int64(running) >= charge.Max
		}
		if charge.Denied && charge.Ban > 0 && !charge.Look {
			c.bans[charge.Key], charge.BanLeft, charge.Wait = charge.Ban, charge.Ban, charge.Ban
		}
		if charge.Denied && !charge.Observe {
			return nil
		}
	}
	for i := range charges {
		charge := &charges[i]
		switch {
		case charge.Denied || charge.Peek:
		case charge.Key.Kind == StoreInFlight:
			c.running[charge.ID] = charge.Key
		default:
			c.used[charge.Key] += charge.Increment
			charge.Debt = c.used[charge.Key]
		}
	}
	return nil
}

func (c *testConn) GiveBack(_ context.Context, charges []StoreCharge) error {
	c.backs.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range charges {
		delete(c.running, charges[i].ID)
		c.used[charges[i].Key] -= min(charges[i].Increment, c.used[charges[i].Key])
		charges[i].Debt = c.used[charges[i].Key]
	}
	return c.err
}

func (c *testConn) Renew(_ context.Context, charges []StoreCharge) error {
	c.renewals.Add(int64(len(charges)))
	return c.failure()
}

func (c *testConn) Forget(_ context.Context, key StoreKey) (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	known := c.used[key] > 0 || c.bans[key] > 0
	delete(c.used, key)
	delete(c.bans, key)
	return known, c.err
}

func (c *testConn) Lease(_ context.Context, request LeaseRequest) (Lease, error) {
	c.leases.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return Lease{}, c.err
	}
	c.lastLease = request
	c.granted += request.Spent - request.Unused
	granted := min(request.Want, request.Count-c.granted)
	c.granted += granted
	return Lease{Slot: 7, Granted: granted, Left: c.leaseLeft, Used: c.granted, Wait: time.Minute}, nil
}

func (c *testConn) Beat(context.Context, Beat) (Pulse, error) {
	c.beats.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pulse, c.err
}

func (c *testConn) Check(context.Context) ([]string, error) { return c.warnings, nil }

func (c *testConn) Close() {}

// newFleetInstance provisions a site that shares a store, which is in use from
// the start.
func newFleetInstance(t *testing.T, options, site string) (*instance, *testConn, *fleet) {
	t.Helper()
	conn := &testConn{
		used: map[StoreKey]time.Duration{}, bans: map[StoreKey]time.Duration{}, running: map[string]StoreKey{},
		leaseLeft: time.Hour, pulse: Pulse{Instances: 1},
	}
	testConns.Store(t.Name(), conn)
	i := newInstance(t, "{\nedge_limit {\nclient connection\npepper 0123456789abcdef\nstore test {\nname \""+t.Name()+"\"\n"+options+
		"\n}\n}\n}\nhttp://test.local {\nedge_limit {\n"+site+"\n}\nrespond ok\n}")
	fleet := i.handlers[0].fleet
	if fleet == nil {
		t.Fatal("there is no fleet")
	}
	fleet.visit()
	return i, conn, fleet
}

var errOfStore = &StoreError{Kind: StoreTimeout, Err: errors.New("no answer")}

// A denied key costs the store nothing until its wait is over, or a second.
func TestStoreDenialIsRemembered(t *testing.T) {
	for _, row := range []struct {
		reason       string
		limit        string
		requests     int
		takes, again int64 // after the requests, and after one more second and request
	}{
		{"until the wait is over", "limit a 2/m", 50, 3, 1},
		{"the same under a ban", "limit a 2/m {\nban 1h\n}", 50, 3, 1},
		{"not where answers give back: the wait may be over at any moment", "limit a 2/m {\non_status 401\n}", 50, 50, 1},
		{"nor where the store denies nothing yet", "limit a 100/m", 50, 50, 1},
	} {
		t.Run(row.reason, func(t *testing.T) {
			i, conn, _ := newFleetInstance(t, "", row.limit)
			i.passed(row.requests, alice, "/")
			expect(t, conn.takes.Load(), row.takes, "calls of the store")
			i.sleep(time.Second + time.Millisecond)
			i.get(alice, "/")
			expect(t, conn.takes.Load(), row.takes+row.again, "calls of the store a second later")
		})
	}
}

// A request that costs less than the one that was denied is asked about again.
func TestStoreDenialOfACostIsNotThatOfAnother(t *testing.T) {
	i, conn, _ := newFleetInstance(t, "", "limit a 4/m {\ncost {http.request.header.X-Cost}\n}\nlimit b 100/m")
	expect(t, i.get(alice, "/", "X-Cost: 3"), 200, "3 of 4")
	expect(t, i.get(alice, "/", "X-Cost: 2"), 429, "2 more are too many")
	expect(t, i.get(alice, "/", "X-Cost: 2"), 429, "and again")
	expect(t, conn.takes.Load(), 2, "calls: the second denial was known")
	expect(t, i.get(alice, "/", "X-Cost: 1"), 200, "1 more is not")
}

// Who comes before it is known whether the store is there waits for that, as long
// as it may wait: a share of what others have used up would be too much.
func TestFirstRequestsWaitForTheStore(t *testing.T) {
	for _, row := range []struct {
		reason, timeout string
		comes           bool
		takes           int64
	}{
		{"it comes in time", "5s", true, 1},
		{"it does not", "5ms", false, 0},
	} {
		t.Run(row.reason, func(t *testing.T) {
			i, conn, fleet := newFleetInstance(t, "timeout "+row.timeout, "limit a 100/m")
			fleet.usable.Store(false)
			fleet.attempt, fleet.attempted = sync.Once{}, make(chan struct{})
			var visit sync.WaitGroup
			visit.Go(func() {
				time.Sleep(20 * time.Millisecond)
				if row.comes {
					fleet.visit()
				}
			})
			expect(t, i.get(alice, "/"), 200, "status")
			expect(t, conn.takes.Load(), row.takes, "calls of the store")
			visit.Wait()
		})
	}
}

// While the store cannot be asked, on_failure says what holds.
func TestOnFailure(t *testing.T) {
	for _, row := range []struct {
		reason  string
		options string
		site    string
		before  int // requests while the store is there
		passed  int // of many afterwards, of the same client
		status  int // of the last
	}{
		{"the share of a limit", "fleet 4", "limit a 8/m", 0, 2, 429},
		{"the share of what is left of a limit", "fleet 4", "limit a 8/m", 4, 1, 429},
		{"nothing is left", "fleet 4", "limit a 8/m", 8, 0, 429},
		{"a share is never nothing", "fleet 100", "limit a 8/m", 0, 1, 429},
		{"nor for a request that costs more", "fleet 100", "limit a 8/m {\ncost 8\n}", 0, 1, 429},
		{"the whole limit", "on_failure local_full\nfleet 4", "limit a 8/m", 0, 8, 429},
		{"what is left of the whole limit", "on_failure local_full\nfleet 4", "limit a 8/m", 5, 3, 429},
		{"all passes", "on_failure open", "limit a 8/m\nin_flight b 1\nceiling c 1/m", 0, 50, 200},
		{"nothing passes", "on_failure closed", "limit a 8/m", 0, 0, 429},
		{"nothing passes a ceiling", "on_failure closed", "ceiling a 8/m", 0, 0, 503},
		{"nothing passes an in_flight", "on_failure closed", "in_flight a 8", 0, 0, 503},
		{"what is only observed denies nothing then either", "on_failure closed", "limit a 8/m {\nobserve\n}", 0, 50, 200},
		{"the share of a ceiling", "fleet 4", "ceiling a 8/m", 0, 2, 503},
		{"what this instance has used of its share", "fleet 4", "ceiling a 8/m", 1, 1, 503},
		{"the whole ceiling", "on_failure local_full\nfleet 4", "ceiling a 8/m", 0, 8, 503},
		{"an in_flight that nobody fills", "fleet 4", "in_flight a 8", 0, 50, 200},
		{"answers that give back", "fleet 4", "limit a 8/m {\non_status 401\n}", 0, 50, 200},
		{"answers that charge late, where a share is less than one", "fleet 4", "limit a 3/h {\non_status late 200\n}", 0, 1, 429},
		{"answers that charge late", "fleet 4", "limit a 8/m {\non_status late 200\n}", 0, 2, 429},
	} {
		t.Run(row.reason, func(t *testing.T) {
			i, conn, fleet := newFleetInstance(t, row.options, row.site)
			if row.before > 0 {
				expect(t, i.passed(row.before, alice, "/"), row.before, "requests that pass while the store is there")
			}
			for _, h := range i.handlers { // no lease outlives the store here
				for _, c := range h.ceilings {
					c.state.lease.permits = 0
				}
			}
			conn.fail(errOfStore)
			fleet.usable.Store(false)
			expect(t, i.passed(50, alice, "/"), row.passed, "requests that pass")
			expect(t, i.get(alice, "/"), row.status, "status of the last")
		})
	}
}

// A store that fails is left alone after some failures in a row, and used again
// once a beat gets through: no request pays for finding out.
func TestBreaker(t *testing.T) {
	i, conn, fleet := newFleetInstance(t, "", "limit a 1000/m")
	conn.fail(errOfStore)
	i.passed(100, alice, "/")
	expect(t, conn.takes.Load(), failuresToTrip, "calls of a store that fails")
	expect(t, fleet.report().State, StoreTimeout, "state")
	expect(t, len(fleet.tripped), 1, "the background is woken")
	fleet.visit()
	expect(t, fleet.usable.Load(), false, "after a beat that fails too")
	conn.fail(nil)
	i.passed(10, alice, "/")
	expect(t, conn.takes.Load(), failuresToTrip, "no request is a probe")
	fleet.visit()
	expect(t, fleet.report().State, stateConnected, "state after a beat")
	i.passed(1, alice, "/")
	expect(t, conn.takes.Load(), failuresToTrip+1, "calls")
}

// A store that fails again and again is asked ever more rarely, down to every
// other second.
func TestPauseAfterFailures(t *testing.T) {
	f := newFleet(&SharedStore{}, []byte("0123456789abcdef"))
	const s = int64(time.Second)
	for _, row := range []struct {
		reason         string
		recovered, now int64
		want           time.Duration
	}{
		{"the first failure", 0, 100 * s, probeInterval},
		{"soon after it was back", 101 * s, 102 * s, 2 * probeInterval},
		{"again", 103 * s, 104 * s, 4 * probeInterval},
		{"again", 105 * s, 106 * s, 8 * probeInterval},
		{"but no more than that", 107 * s, 108 * s, maxPause},
		{"after a while without", 109 * s, 115 * s, probeInterval},
	} {
		f.recovered = row.recovered
		expect(t, f.pauseAfter(row.now), row.want, row.reason)
	}
}

// One success ends a row of failures.
func TestBreakerCountsFailuresInARow(t *testing.T) {
	i, conn, fleet := newFleetInstance(t, "", "limit a 1000/m")
	for range 5 {
		conn.fail(errOfStore)
		i.passed(failuresToTrip-1, alice, "/")
		conn.fail(nil)
		i.passed(1, alice, "/")
	}
	expect(t, fleet.usable.Load(), true, "usable")
}

// What a share has allowed stays used when the store answers in between: a store
// that answers now and then would else renew the share each time.
func TestShareIsNotRenewedByAnAnswer(t *testing.T) {
	i, conn, _ := newFleetInstance(t, "", "limit a 4/d")
	passed := 0
	for n := range 200 {
		conn.fail(nil)
		if n%2 == 0 {
			conn.fail(errOfStore)
		}
		passed += i.passed(1, alice, "/")
		i.sleep(2 * time.Second) // no denial is remembered for longer
	}
	if passed < 4 || passed > 8 {
		t.Errorf("%d requests pass, want the store's 4, and this instance's share of 4 at most", passed)
	}
}

// A request waits for the store once, whatever it tells it.
func TestFinishTakesFromOneTime(t *testing.T) {
	f := newFleet(&SharedStore{}, []byte("0123456789abcdef"))
	left := 20 * time.Millisecond
	never := make(chan struct{})
	defer close(never)
	f.finish(&left, func() { <-never })
	if left > 0 {
		t.Errorf("%s are left after a call that never ended", left)
	}
	begin := clock()
	f.finish(&left, func() { <-never })
	if took := time.Duration(clock() - begin); took > 10*time.Second {
		t.Errorf("waited for %s with no time left", took)
	}
}

// Of requests that the store never heard of it is not told that they ended.
func TestInFlightThatTheStoreNeverKnew(t *testing.T) {
	i, conn, fleet := newFleetInstance(t, "", "in_flight f 5")
	fleet.usable.Store(false)
	expect(t, i.passed(20, alice, "/"), 20, "requests pass while the store is away")
	expect(t, len(fleet.lost), 0, "endings to tell")
	wait(t, func() bool { fleet.mu.Lock(); defer fleet.mu.Unlock(); return len(fleet.running) == 0 }, "none runs")
	running := i.begin(t, alice)
	fleet.visit()
	expect(t, conn.renewals.Load(), 1, "a request that runs is told to the store when it is back")
	running.end(200)
	wait(t, func() bool { return conn.backs.Load() == 1 }, "its end is told too")
}

// Where the next call would fail too, the first one is enough.
func TestBreakerTripsAtOnce(t *testing.T) {
	for _, kind := range []string{StoreAuth, StoreReadOnly, StoreMemory, StoreCluster, StoreUnavailable, StoreNotRedis, StoreTLS} {
		t.Run(kind, func(t *testing.T) {
			i, conn, fleet := newFleetInstance(t, "", "limit a 1000/m")
			conn.fail(&StoreError{Kind: kind, Err: errors.New("refused"), Advice: "mend it"})
			i.passed(10, alice, "/")
			expect(t, conn.takes.Load(), 1, "calls")
			report := fleet.report()
			expect(t, report.State, kind, "state")
			expect(t, report.Error, "refused: mend it", "error")
		})
	}
}

// The metric has each state that a store can be in, and no other. Calls that come
// too late, one after the other, are a state; that too many are under way is not,
// and neither is a value that is not ours.
func TestStatesInTheMetric(t *testing.T) {
	i, conn, fleet := newFleetInstance(t, "", "limit a 1000/m")
	conn.fail(&StoreError{Kind: StoreStale, Err: errors.New("too late")})
	i.passed(failuresToTrip, alice, "/")
	CountGarbage(1)
	expect(t, fleet.report().State, StoreStale, "state")
	series := seriesOf(t, i.ctx.GetMetricsRegistry())
	of := func(state string) string { return fmt.Sprintf("caddy_edge_limit_store_state{state=%q}", state) }
	for _, state := range storeStates {
		_, there := series[of(state)]
		expect(t, there, true, state+" is there")
	}
	expect(t, series[of(StoreStale)], 1, "stores that are asked too late")
	for _, kind := range []string{StoreOverload, StoreGarbage} {
		_, there := series[of(kind)]
		expect(t, there, false, kind+" is there as a state")
		_, there = series[fmt.Sprintf("caddy_edge_limit_store_errors_total{kind=%q}", kind)]
		expect(t, there, true, kind+" is there as an error")
	}
}

// A store that other instances use with another pepper would count apart from
// them, under names that say the same.
func TestOtherPepperInUse(t *testing.T) {
	i, conn, fleet := newFleetInstance(t, "", "limit a 2/m")
	conn.mu.Lock()
	conn.pulse = Pulse{OtherPepper: true}
	conn.mu.Unlock()
	fleet.visit()
	expect(t, i.passed(10, alice, "/"), 2, "requests pass, by this instance's own count")
	expect(t, conn.takes.Load(), 0, "calls")
	expect(t, fleet.report().State, StorePepper, "state")
}

// Calls that are under way are bounded: the client queues without end.
func TestCallsUnderWayAreBounded(t *testing.T) {
	i, conn, fleet := newFleetInstance(t, "", "limit a 100000/m")
	for range maxStoreCalls {
		fleet.calls <- struct{}{}
	}
	expect(t, i.passed(3, alice, "/"), 3, "requests pass all the same")
	expect(t, conn.takes.Load(), 0, "calls")
	expect(t, len(fleet.calls), maxStoreCalls, "calls under way")
	<-fleet.calls
	i.get(alice, "/")
	expect(t, conn.takes.Load(), 1, "calls when there is room")
	expect(t, fleet.usable.Load(), true, "that is no failure of the store")
}

// What the store has charged is given back when something of this instance's
// denies.
func TestStoreChargesAreGivenBack(t *testing.T) {
	i, conn, _ := newFleetInstance(t, "", "limit a 10/m\nin_flight f 5\nceiling c 3/m")
	expect(t, i.passed(3, alice, "/"), 3, "requests that the ceiling admits")
	i.handlers[0].ceilings[0].state.lease.deniedUntil = 0 // so that the store is asked again
	expect(t, i.get(alice, "/"), 503, "the next one")
	wait(t, func() bool {
		conn.mu.Lock()
		defer conn.mu.Unlock()
		used := time.Duration(0)
		for _, debt := range conn.used {
			used += debt
		}
		return used == 3*time.Minute/10 && len(conn.running) == 0
	}, "three requests stay charged, and none runs")
}

// wait polls for what another goroutine is about to do.
func wait(t *testing.T, done func() bool, what string) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not seen: %s", what)
		}
	}
}

// The requests that run are told to the store again when it may have forgotten
// them, and those that ended while it could not be told are taken back then.
func TestInFlightIsToldAgain(t *testing.T) {
	i, conn, fleet := newFleetInstance(t, "", "in_flight f 5")
	first, second := i.begin(t, alice), i.begin(t, alice)
	expect(t, len(conn.running), 2, "requests that the store knows")
	conn.fail(errOfStore)
	first.end(200)
	wait(t, func() bool { fleet.mu.Lock(); defer fleet.mu.Unlock(); return len(fleet.lost) == 1 }, "an ending that the store must still be told")
	fleet.usable.Store(false)
	conn.fail(nil)
	conn.renewals.Store(0)
	fleet.visit()
	expect(t, conn.renewals.Load(), 1, "requests that still run are renewed")
	expect(t, len(fleet.lost), 0, "endings left to tell")
	second.end(200)
	wait(t, func() bool { conn.mu.Lock(); defer conn.mu.Unlock(); return len(conn.running) == 0 }, "none runs")
}

// The number of instances grows at once and shrinks after a while.
func TestInstances(t *testing.T) {
	_, _, fleet := newFleetInstance(t, "fleet 2", "limit a 2/m")
	const s = int64(time.Second)
	for _, row := range []struct {
		reason string
		now    int64
		seen   int
		want   int
	}{
		{"the option is the least", 1 * s, 1, 2},
		{"more are believed at once", 2 * s, 5, 5},
		{"fewer are not: the store may have been away", 3 * s, 1, 5},
		{"nor while that is fresh", 12 * s, 1, 5},
		{"but after a while", 13 * s, 1, 2},
		{"and more again", 14 * s, 3, 3},
		{"a dip that ends starts anew", 15 * s, 2, 3},
		{"the dip has ended", 16 * s, 3, 3},
		{"so this one is fresh", 26 * s, 2, 3},
	} {
		fleet.see(row.seen, row.now)
		expect(t, fleet.size(), row.want, row.reason)
	}
}

// What leaves the process tells nothing of the client, and differs by budget,
// kind and pepper.
func TestStoreKeys(t *testing.T) {
	one := newFleet(&SharedStore{ID: "a"}, []byte("0123456789abcdef"))
	other := newFleet(&SharedStore{ID: "a"}, []byte("0123456789abcdeg"))
	seen := map[[16]byte]string{}
	for name, key := range map[string]StoreKey{
		"one":                 one.key(StoreLimit, "a", []byte("bc")),
		"text moved":          one.key(StoreLimit, "ab", []byte("c")),
		"another pepper":      other.key(StoreLimit, "a", []byte("bc")),
		"another name":        one.key(StoreLimit, "b", []byte("bc")),
		"another key":         one.key(StoreLimit, "a", []byte("bd")),
		"no key, as ceilings": one.key(StoreCeiling, "a", nil),
	} {
		if before, ok := seen[key.Hash]; ok {
			t.Errorf("%s and %s are alike", name, before)
		}
		seen[key.Hash] = name
	}
	expect(t, one.key(StoreLimit, "a", []byte("bc")), one.key(StoreLimit, "a", []byte("bc")), "the same again")
	if allocs := testing.AllocsPerRun(100, func() { one.key(StoreLimit, "a", []byte("bc")) }); allocs > 0 && !raceDetector {
		t.Errorf("a key takes %v allocations", allocs)
	}
}

// A shared store needs a pepper that instances can share.
func TestStoreNeedsPepper(t *testing.T) {
	testConns.Store(t.Name(), &testConn{})
	_, err := tryInstance(t, configOf(t, "{\nedge_limit {\nstore test {\nname "+t.Name()+"\n}\n}\n}\nhttp://test.local {\nedge_limit {\nlimit a 1/m\n}\n}"))
	if err == nil || !strings.Contains(err.Error(), "add pepper {env.EDGE_LIMIT_PEPPER}") {
		t.Errorf("without a pepper: %v", err)
	}
}

// Numbers that a store cannot keep are refused at load.
func TestSharedNumbers(t *testing.T) {
	for _, row := range []struct{ site, wants string }{
		{"limit a 200000/s", "at most 100000 a second"},
		{"ceiling a 5/50ms", "window must be at least 100ms"},
	} {
		testConns.Store(t.Name(), &testConn{})
		_, err := tryInstance(t, configOf(t, "{\nedge_limit {\npepper 0123456789abcdef\nstore test {\nname "+t.Name()+"\n}\n}\n}\nhttp://test.local {\nedge_limit {\n"+row.site+"\n}\n}"))
		if err == nil || !strings.Contains(err.Error(), row.wants) {
			t.Errorf("%s: %v, want %q", row.site, err, row.wants)
		}
	}
}

// The store's settings are looked at now and then, and what is wrong with them is
// said once for as long as it is so.
func TestStoreSettingsAreWatched(t *testing.T) {
	_, conn, fleet := newFleetInstance(t, "", "limit a 1/m")
	core, logs := observer.New(zapcore.WarnLevel)
	fleet.logger.Store(zap.New(core))
	for _, step := range []struct {
		reason string
		since  time.Duration // the last look
		wrong  []string
		lines  int // so far
	}{
		{"nothing is wrong", checkInterval, nil, 0},
		{"something is, and it is not time to look", checkInterval - time.Second, []string{"bad"}, 0},
		{"it is time", checkInterval, []string{"bad"}, 1},
		{"still so", checkInterval, []string{"bad"}, 1},
		{"something else too", checkInterval, []string{"worse", "bad"}, 2},
		{"mended", checkInterval, nil, 2},
		{"wrong again", checkInterval, []string{"bad"}, 3},
	} {
		conn.warnings = step.wrong
		fleet.checked = clock() - int64(step.since)
		fleet.visit()
		expect(t, logs.Len(), step.lines, step.reason+": lines")
	}
}

// A reload keeps the connections; another store, or another pepper, is another
// connection.
func TestReloadKeepsTheStore(t *testing.T) {
	_, _, before := newFleetInstance(t, "", "limit a 2/m")
	store := &SharedStore{ID: t.Name()}
	for _, row := range []struct {
		reason string
		store  *SharedStore
		pepper string
		same   bool
	}{
		{"the same store", store, "0123456789abcdef", true},
		{"another one", &SharedStore{ID: "other"}, "0123456789abcdef", false},
		{"another pepper", store, "0123456789abcdeg", false},
	} {
		f, key, err := useFleet(row.store, []byte(row.pepper))
		if err != nil {
			t.Fatal(err)
		}
		expect(t, f == before, row.same, row.reason)
		releaseState(key)
	}
}

// The admin API asks the store about a key, and forgives it there.
func TestAdminAsksTheStore(t *testing.T) {
	i, conn, _ := newFleetInstance(t, "", "limit a 2/m")
	expect(t, i.passed(5, alice, "/"), 2, "requests pass")
	limit := i.handlers[0].keyed[0]
	key, material, err := limit.template.lookUp(map[string]string{"client": alice})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := limit.consultStore(key, material, false); err != nil {
		t.Fatal(err)
	}
	expect(t, limit.reportKey(key, clock()).Remaining, 0, "requests that remain")
	forgiven, err := limit.consultStore(key, material, true)
	expect(t, err, nil, "error")
	expect(t, forgiven, true, "forgiven")
	limit.state.ledger.Load().Delete(key)
	expect(t, i.passed(5, alice, "/"), 2, "requests pass after that")
	conn.fail(errOfStore)
	_, err = limit.consultStore(key, material, true)
	expect(t, errors.Is(err, errOfStore), true, "a store that cannot be asked is told")
}

// Leases: permits are used up before the store is asked again, only one call is
// under way, and what a lease leaves unused is told with the next.
func TestLease(t *testing.T) {
	i, conn, _ := newFleetInstance(t, "", "ceiling c 10/m")
	c := i.handlers[0].ceilings[0]
	now := clock()
	passed := 0
	for range 30 {
		if _, _, ok := c.take(0, 0, now); ok {
			passed++
		}
	}
	expect(t, passed, 10, "requests pass")
	conn.mu.Lock()
	expect(t, conn.granted, 10, "permits that were granted")
	conn.mu.Unlock()
	wait, ok := c.peek(0, 0, clock())
	expect(t, ok, false, "a permit is left")
	if wait < 30*time.Second || wait > time.Minute {
		t.Errorf("the wait that clients are told is %s, want what the store said", wait)
	}
	expect(t, c.state.usedRatio(now), 1, "used of the fleet's ceiling")
}

func TestLeaseEndsWithItsSlot(t *testing.T) {
	i, conn, _ := newFleetInstance(t, "", "ceiling c 10/m")
	c := i.handlers[0].ceilings[0]
	l := &c.state.lease
	l.permits, l.slot, l.serial, l.until = 5, 3, 9, clock() // over just now
	_, _, ok := c.take(0, 0, clock())
	expect(t, ok, true, "a new lease is got")
	expect(t, conn.lastLease.Over, 3, "the slot that is over")
	expect(t, conn.lastLease.Unused, 5, "permits of it that were not used")
}

func TestUnusedPermitsAreHandedBack(t *testing.T) {
	i, conn, _ := newFleetInstance(t, "", "ceiling c 10/m")
	c := i.handlers[0].ceilings[0]
	conn.leaseLeft = 20 * time.Millisecond
	c.state.lease.waiting = 4 // so that more than one permit is asked for
	_, _, ok := c.take(0, 0, clock())
	expect(t, ok, true, "the first request passes")
	wait(t, func() bool { conn.mu.Lock(); defer conn.mu.Unlock(); return conn.granted == 1 }, "four permits come back when the slot is over")
}

// A request that has waited for its other budgets does not wait for as long again.
func TestLeaseTimeIsTheRequests(t *testing.T) {
	i, conn, fleet := newFleetInstance(t, "timeout 5s", "ceiling c 100/m")
	c := i.handlers[0].ceilings[0]
	_, _, ok := c.take(0, 0, clock()-int64(fleet.timeout))
	expect(t, ok, true, "a request that has no time left passes by this instance's share")
	conn.mu.Lock()
	defer conn.mu.Unlock()
	expect(t, conn.granted, 0, "permits that the store was asked for")
}

// Requests that come while a lease is asked for wait for that one call.
func TestLeaseIsAskedForOnce(t *testing.T) {
	i, conn, fleet := newFleetInstance(t, "timeout 5s", "ceiling c 100/m")
	c := i.handlers[0].ceilings[0]
	var passed atomic.Int64
	var requests sync.WaitGroup
	conn.mu.Lock() // the call cannot end
	for range 40 {
		requests.Go(func() {
			if _, _, ok := c.take(0, 0, clock()); ok {
				passed.Add(1)
			}
		})
	}
	wait(t, func() bool {
		c.state.lease.mu.Lock()
		defer c.state.lease.mu.Unlock()
		return c.state.lease.waiting == 39
	}, "39 requests wait")
	expect(t, len(fleet.calls), 1, "calls under way")
	conn.mu.Unlock()
	requests.Wait()
	expect(t, passed.Load(), 40, "requests pass")
	if calls := conn.leases.Load(); calls > 3 {
		t.Errorf("%d calls for 40 requests, want the first, and one for those that waited", calls)
	}
}

// A request waits for the store no longer than the option says, whatever it
// waits for.
func TestLeaseIsNotWaitedForLongerThanTheTimeout(t *testing.T) {
	i, conn, _ := newFleetInstance(t, "timeout 10ms", "ceiling c 100/m")
	c := i.handlers[0].ceilings[0]
	l := &c.state.lease
	l.calling = make(chan struct{}) // a call that never ends
	_, _, ok := c.take(0, 0, clock())
	expect(t, ok, true, "the request passes by this instance's share")
	expect(t, conn.leases.Load(), 0, "calls of its own")
	expect(t, l.spent, 1, "admitted without the store, which the next lease tells")
}

func TestLeaseSlots(t *testing.T) {
	for _, row := range []struct {
		window time.Duration
		slots  int64
		slot   time.Duration
	}{
		{100 * time.Millisecond, 10, 10 * time.Millisecond},
		{time.Second, 20, 50 * time.Millisecond},
		{7 * time.Second, 64, 109375 * time.Microsecond},
		{time.Hour, 64, 56250 * time.Millisecond},
		{10 * time.Second / 3, 64, 52084 * time.Microsecond},
	} {
		slots, slot := leaseSlotsOf(row.window)
		expect(t, slots, row.slots, row.window.String()+": slots")
		expect(t, slot, row.slot, row.window.String()+": length of one")
		if slot*time.Duration(slots) < row.window {
			t.Errorf("%s: the slots do not cover the window", row.window)
		}
	}
}

// The share of a limit is as much of its budget for every number of instances.
func TestShareOf(t *testing.T) {
	limit := &Limit{}
	for _, row := range []struct{ increment, instances, want int64 }{
		{6, 1, 6}, {6, 4, 24},
		{int64(maxToleranceInTime), 4, int64(maxToleranceInTime) / 4 * 4},
		{int64(maxToleranceInTime) / 2, 10_000, int64(maxToleranceInTime) / 10_000 * 10_000},
	} {
		expect(t, limit.shareOf(row.increment, int(row.instances)), row.want, fmt.Sprint(row))
	}
}

// Nothing of a store reaches a client: no error of it is a 5xx of ours.
func TestStoreErrorsAreNoAnswers(t *testing.T) {
	for _, kind := range StoreErrorKinds {
		i, conn, _ := newFleetInstance(t, "", "limit a 1000/m\nin_flight b 100\nceiling c 1000/m")
		conn.fail(&StoreError{Kind: kind, Err: errors.New("broken")})
		for range 30 {
			if status := i.get(alice, "/"); status != http.StatusOK {
				t.Fatalf("%s: status %d", kind, status)
			}
		}
		i.stop()
	}
}
