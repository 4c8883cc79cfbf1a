package edgelimit

import (
	"testing"
	"time"
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
				from.take(state.buckets, key, from.emissionInterval, now)
			}
			ban := now + int64(42*time.Minute)
			state.buckets.Set(banKey(key), now, ban)
			state.adopt(to, now)
			tat := state.buckets.Peek(key, now)
			expect(t, to.remaining(tat, now), tt.remaining, "remaining")
			expect(t, time.Duration(max(0, tat-now)).Round(time.Millisecond), tt.untilWhole, "until the budget is whole")
			expect(t, state.buckets.Peek(banKey(key), now), ban, "a ban keeps its end")
			state.adopt(to, now)
			expect(t, state.buckets.Peek(key, now), tat, "a second time changes nothing")
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
		first, _, _ := state.pending.take(before.gcra, state.buckets, key, before.emissionInterval, now)
		second, _, _ := state.pending.take(before.gcra, state.buckets, key, before.emissionInterval, now)
		state.adopt(after, now)
		full := after.remaining(now, now)
		expect(t, after.remaining(state.buckets.Peek(key, now), now), full*3/5, to+": two of five are used")
		state.pending.end(after.gcra, state.buckets, key, first, true, now)
		expect(t, after.remaining(state.buckets.Peek(key, now), now), full*4/5, to+": one is given back")
		state.pending.end(after.gcra, state.buckets, key, second, true, now)
		expect(t, after.remaining(state.buckets.Peek(key, now), now), full, to+": all is there again")
	}
}

func TestChangedMaxKeys(t *testing.T) {
	state := newLimitState(numbersOf(t, "5/h", 0, 1000))
	for n := range uint64(1000) {
		state.buckets.Set(n<<32+2, 1, int64(time.Hour))
	}
	state.adopt(numbersOf(t, "5/h", 0, 100), 1)
	if keys := state.buckets.Len(); keys > 100 {
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
