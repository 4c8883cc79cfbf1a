package edgelimit

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
)

func numbersOf(t *testing.T, text string, burst int64, maxKeys int) limitNumbers {
	t.Helper()
	r, err := parseRate(text)
	if err != nil {
		t.Fatal(err)
	}
	if burst == 0 {
		burst = r.count
	}
	g, err := newGCRA(r, burst)
	if err != nil {
		t.Fatal(err)
	}
	return limitNumbers{g, maxKeys}
}

// adoptAll opens a ledger with these numbers and moves all debts into it.
func (s *limitState) adoptAll(numbers limitNumbers, now int64) {
	if s.open(numbers, now) {
		s.gather(now)
	}
}

// Changed numbers keep what was used: the share of the budget, neither renewed
// nor longer than the new numbers say.
func TestChangedNumbers(t *testing.T) {
	tests := []struct {
		why        string
		from, to   string
		used       int
		remaining  int64
		untilWhole time.Duration
	}{
		{"used up stays used up, in a longer window", "5/m", "5/h", 5, 0, time.Hour},
		{"used up stays used up, and not for longer than the new window", "5/h", "5/m", 5, 0, time.Minute},
		{"two of four are two of eight hundred of sixteen hundred", "4/h", "1600/h", 2, 800, 30 * time.Minute},
		{"nothing used stays nothing used", "5/m", "5/h", 0, 5, 0},
	}
	for _, tt := range tests {
		t.Run(tt.why, func(t *testing.T) {
			const key, now = uint64(1 << 40), int64(time.Hour)
			from, to := numbersOf(t, tt.from, 0, 1000), numbersOf(t, tt.to, 0, 1000)
			state := newLimitState(from)
			for range tt.used {
				from.take(state.ledger.Load().Table, key, from.emissionInterval, now)
			}
			ban := now + int64(42*time.Minute)
			state.ledger.Load().Set(banKey(key), now, ban)
			state.adoptAll(to, now)
			tat := state.ledger.Load().Peek(key, now)
			expect(t, to.remaining(tat, now), tt.remaining, "remaining")
			expect(t, time.Duration(max(0, tat-now)).Round(time.Millisecond), tt.untilWhole, "until the budget is whole")
			expect(t, state.ledger.Load().Peek(banKey(key), now), ban, "a ban keeps its end")
			state.adoptAll(to, now)
			expect(t, state.ledger.Load().Peek(key, now), tat, "a second time changes nothing")
		})
	}
}

// What on_status charged before a reload is given back in the new numbers: the
// budget of who did it right is whole again, and nothing is left over.
func TestChangedNumbersOfPendingCharges(t *testing.T) {
	for _, to := range []string{"5/m", "5/d", "500/h"} {
		const key, now = uint64(1 << 40), int64(time.Hour)
		before, after := numbersOf(t, "5/h", 0, 1000), numbersOf(t, to, 0, 1000)
		state := newLimitState(before)
		first, _, _ := state.pending.take(before.gcra, state.ledger.Load(), key, before.emissionInterval, now)
		second, _, _ := state.pending.take(before.gcra, state.ledger.Load(), key, before.emissionInterval, now)
		state.adoptAll(after, now)
		full := after.remaining(now, now)
		expect(t, after.remaining(state.ledger.Load().Peek(key, now), now), full*3/5, to+": two of five are used")
		state.pending.end(state.ledger.Load(), key, first, true, now)
		expect(t, after.remaining(state.ledger.Load().Peek(key, now), now), full*4/5, to+": one is given back")
		state.pending.end(state.ledger.Load(), key, second, true, now)
		expect(t, after.remaining(state.ledger.Load().Peek(key, now), now), full, to+": all is there again")
	}
}

// While debts move, each key owes what it owed, by the numbers that are in force,
// and what its requests add to that: none is counted twice, or by other numbers,
// or not at all. So nobody is banned who was far from his limit.
func TestRequestsWhileDebtsMove(t *testing.T) {
	for _, row := range []struct {
		why      string
		from, to string
		maxKeys  int
	}{
		{"slower", "100/h", "100/d", 100_000},
		{"much slower", "100/s", "100/7d", 100_000},
		{"faster", "100/d", "100/m", 100_000},
		{"the same numbers, in a smaller table that has room", "100/h", "100/h", 60_000},
		{"in a larger one", "100/h", "100/h", 1_000_000},
	} {
		t.Run(row.why, func(t *testing.T) {
			const keys, used, now = 40_000, 10, int64(time.Hour)
			from, to := numbersOf(t, row.from, 0, 100_000), numbersOf(t, row.to, 0, row.maxKeys)
			state := newLimitState(from)
			app := new(App)
			// requests of both configurations are under way
			limits := []*Limit{
				{Name: "old", app: app, state: state, gcra: from.gcra, numbers: from, Ban: caddy.Duration(time.Hour)},
				{Name: "new", app: app, state: state, gcra: to.gcra, numbers: to, Ban: caddy.Duration(time.Hour)},
			}
			hash := func(n int) uint64 { return uint64(n+1) * 0x9e3779b97f4a7c15 &^ 1 }
			for n := range keys {
				for range used {
					limits[0].take(hash(n), from.emissionInterval, now)
				}
			}
			var asked [keys]atomic.Int32
			var done atomic.Bool
			var callers sync.WaitGroup
			for g := range 4 {
				callers.Go(func() {
					for i := g; !done.Load(); i++ {
						limit, n := limits[i%2], i*7919%keys
						if asked[n].Load() >= 20 {
							continue
						}
						if _, wait, ok := limit.take(hash(n), limit.gcra.emissionInterval, now); !ok {
							limit.deny(hash(n), wait, now)
							t.Errorf("key %d is denied after %d of 100 requests", n, used+asked[n].Load())
							return
						}
						asked[n].Add(1)
					}
				})
			}
			if !state.open(to, now) {
				t.Error("no ledger was opened")
			}
			state.gather(now)
			done.Store(true)
			callers.Wait()
			debts := state.ledger.Load()
			expect(t, debts.limitNumbers, to, "numbers in force")
			lost := 0
			for n := range keys {
				left, want := debts.remaining(debts.Peek(hash(n), now), now), 100-used-int64(asked[n].Load())
				if left < want-1 || left > want+1 { // rounding
					lost++
				}
			}
			if lost > 4 { // one of each caller's may have been under way in the moment of opening
				t.Errorf("%d of %d keys do not owe what they have used", lost, keys)
			}
		})
	}
}

// A share of a small burst lets a request pass that is more than the burst: all of
// that is given back.
func TestPendingChargeAboveTheBurst(t *testing.T) {
	numbers := numbersOf(t, "1/h", 0, 1000)
	state := newLimitState(numbers)
	debts, share := state.ledger.Load(), numbers.gcra
	share.tolerance = 3 * numbers.emissionInterval
	id, _, ok := state.pending.take(share, debts, 2, share.tolerance, 1)
	expect(t, ok, true, "it passes")
	state.pending.end(debts, 2, id, true, 1)
	expect(t, debts.Peek(2, 1), 1, "what is owed afterwards")
}

// What is in flight is remembered for as long as it is, and no longer.
func TestPendingChargesEnd(t *testing.T) {
	numbers := numbersOf(t, "5/h", 0, 1000)
	state := newLimitState(numbers)
	debts := state.ledger.Load()
	var ids [100]int64
	for n := range ids {
		ids[n], _, _ = state.pending.take(numbers.gcra, debts, uint64(n)<<57|2, numbers.emissionInterval, 1)
	}
	for n, id := range ids {
		state.pending.end(debts, uint64(n)<<57|2, id, n%2 == 0, 1)
	}
	for i := range state.pending.shards {
		expect(t, len(state.pending.shards[i].byKey), 0, "keys that are remembered")
	}
}

func TestChangedMaxKeys(t *testing.T) {
	state := newLimitState(numbersOf(t, "5/h", 0, 1000))
	for n := range uint64(1000) {
		state.ledger.Load().Set(n<<32+2, 1, int64(time.Hour))
	}
	state.adoptAll(numbersOf(t, "5/h", 0, 100), 1)
	if keys := state.ledger.Load().Len(); keys > 100 {
		t.Errorf("%d keys are held, the new bound is 100", keys)
	}
}

// A ceiling carries its used count over, as if it had been used just now.
func TestChangedCeiling(t *testing.T) {
	s := newSlidingCount(rate{10, time.Minute})
	now := int64(time.Hour)
	for range 7 {
		s.take(now)
	}
	s.adopt(rate{8, time.Hour}, now)
	for n := range 3 {
		_, _, ok := s.take(now)
		expect(t, ok, n < 1, "seven of eight are used")
	}
	s.adopt(rate{5, time.Second}, now)
	_, _, ok := s.take(now + int64(900*time.Millisecond))
	expect(t, ok, false, "more than the new count is used")
	_, _, ok = s.take(now + int64(1100*time.Millisecond))
	expect(t, ok, true, "and for no longer than the new window")
}

// There and back again gives nothing back that was used.
func TestChangedCeilingThereAndBack(t *testing.T) {
	hundred, five := rate{100, time.Hour}, rate{5, time.Hour}
	s := newSlidingCount(hundred)
	now := int64(time.Hour)
	for range 90 {
		s.take(now)
	}
	for range 3 {
		now += int64(time.Minute)
		s.adopt(five, now)
		_, _, ok := s.take(now)
		expect(t, ok, false, "ninety of five are used")
		s.adopt(hundred, now)
	}
	passed := 0
	for range 100 {
		if _, _, ok := s.take(now); ok {
			passed++
		}
	}
	expect(t, passed, 10, "what is left of a hundred")
	s.adopt(five, now)
	now += int64(time.Hour)
	_, _, ok := s.take(now)
	expect(t, ok, true, "an hour later")
	s.adopt(hundred, now)
	for range 95 {
		s.take(now)
	}
	_, _, ok = s.take(now)
	expect(t, ok, true, "nothing of before counts any more")
}

// A debt that is on its way from one ledger to the next is in neither for a
// moment, and nobody may look for it then.
func TestNobodySeesADebtOnItsWay(t *testing.T) {
	const keys, now = 20_000, int64(time.Hour)
	from, to := numbersOf(t, "1/h", 0, 2*keys), numbersOf(t, "1/d", 0, 2*keys)
	for range 5 {
		state := newLimitState(from)
		for n := range uint64(keys) {
			state.ledger.Load().Add((n+1)*0x9e3779b97f4a7c15, now, from.emissionInterval, from.tolerance)
		}
		var order []uint64 // that of gather
		for key := range state.ledger.Load().All() {
			order = append(order, key)
		}
		if !state.open(to, now) {
			t.Fatal("no ledger was opened")
		}
		begin := make(chan struct{})
		var callers sync.WaitGroup
		for range 2 {
			callers.Go(func() {
				<-begin
				for _, key := range order {
					if state.of(key, now).Peek(key, now) == 0 {
						t.Errorf("key %x owes nothing for a moment", key)
						return
					}
				}
			})
		}
		close(begin)
		state.gather(now)
		callers.Wait()
	}
}
