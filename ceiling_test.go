package edgelimit

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"
)

func slidingCountOf(t *testing.T, text string) (*slidingCount, rate) {
	t.Helper()
	r, err := parseRate(text)
	if err != nil {
		t.Fatal(err)
	}
	return newSlidingCount(r), r
}

// cuts is into how many slots a ceiling may cut its window. What depends on it
// allows for one slot of waste.
const cuts = 64

// arrivals is a way in which requests come: when the next one does, after one
// that passed or has to wait.
type arrivals struct {
	name string
	next func(random *rand.Rand, r rate, now int64, wait time.Duration) int64
}

var arrivalPatterns = []arrivals{
	{"a flood", func(random *rand.Rand, r rate, now int64, _ time.Duration) int64 {
		return now + random.Int64N(int64(r.window)/(4*r.count)+2)
	}},
	{"steady, just below the rate", func(_ *rand.Rand, r rate, now int64, _ time.Duration) int64 {
		return now + int64(r.window)/r.count + 1
	}},
	{"steady, just above the rate", func(_ *rand.Rand, r rate, now int64, _ time.Duration) int64 {
		return now + max(int64(r.window)/r.count*99/100, 1)
	}},
	{"bursts with pauses of about a window", func(random *rand.Rand, r rate, now int64, _ time.Duration) int64 {
		if random.Int64N(2*r.count) == 0 {
			return now + int64(r.window) - 2 + random.Int64N(4)
		}
		return now
	}},
	{"bursts with pauses of any length", func(random *rand.Rand, r rate, now int64, _ time.Duration) int64 {
		if random.Int64N(r.count) == 0 {
			return now + random.Int64N(3*int64(r.window))
		}
		return now + random.Int64N(3)
	}},
	{"whoever is denied comes back exactly when told", func(_ *rand.Rand, _ rate, now int64, wait time.Duration) int64 {
		return now + int64(wait)
	}},
	{"whoever is denied comes back a nanosecond early, and then again", func(random *rand.Rand, _ rate, now int64, wait time.Duration) int64 {
		return now + max(int64(wait)-random.Int64N(2), 0)
	}},
	{"at the ends of slots", func(random *rand.Rand, r rate, now int64, _ time.Duration) int64 {
		slot := (int64(r.window) + windowSlots - 1) / windowSlots
		if random.Int64N(r.count/8+1) > 0 {
			return now
		}
		return (now/slot+1+random.Int64N(3))*slot - random.Int64N(2)
	}},
	{"at the ends of windows", func(random *rand.Rand, r rate, now int64, _ time.Duration) int64 {
		if random.Int64N(r.count+1) > 0 {
			return now
		}
		return (now/int64(r.window)+1)*int64(r.window) - random.Int64N(2)
	}},
	{"half the count, twice a window", func(random *rand.Rand, r rate, now int64, _ time.Duration) int64 {
		if random.Int64N(r.count/2+1) > 0 {
			return now
		}
		return now + int64(r.window)/2
	}},
	{"anything", func(random *rand.Rand, r rate, now int64, wait time.Duration) int64 {
		switch random.IntN(8) {
		case 0:
			return now + random.Int64N(int64(r.window))
		case 1:
			return now + int64(wait)
		case 2:
			return now + random.Int64N(int64(r.window)/windowSlots+1)
		default:
			return now + random.Int64N(int64(r.window)/r.count+1)
		}
	}},
}

// ceilingRate is a count from 1 to 5000 in a window from a millisecond to ten
// hours.
func ceilingRate(random *rand.Rand) rate {
	for {
		window := time.Duration(1e6 + random.Int64N(int64(1e6)<<random.IntN(26)))
		count := 1 + random.Int64N(int64(1)<<random.IntN(14))
		if r, err := parseRate(fmt.Sprintf("%d/%v", min(count, 5000), min(window, 10*time.Hour))); err == nil {
			return r
		}
	}
}

// In any window of its length, wherever that starts, no more requests pass than
// the count.
func TestCeilingHoldsInAnyWindow(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for _, pattern := range arrivalPatterns {
		t.Run(pattern.name, func(t *testing.T) {
			denied := 0
			for range 15 {
				r := ceilingRate(random)
				s := newSlidingCount(r)
				now := 1 + random.Int64N(int64(1000*time.Hour))
				var admitted []int64
				for range min(10*r.count+100, 10_000) {
					_, wait, ok := s.take(now)
					if ok {
						admitted = append(admitted, now)
					} else if denied++; wait <= 0 {
						t.Fatalf("%v: a wait of %v", r, wait)
					}
					now = pattern.next(random, r, now, wait)
				}
				checkWindows(t, r, admitted)
			}
			if denied == 0 && pattern.name != "steady, just below the rate" {
				t.Error("nothing was denied, so nothing was tested")
			}
		})
	}
}

// Who fills the ceiling in one moment, wherever in a slot that is, finds it full
// for at least a window: not a nanosecond less, for windows of any length.
func TestCeilingIsFullForAWindow(t *testing.T) {
	for _, text := range []string{"1/1ms", "3/1000001ns", "7/1000063ns", "1/s", "10/1000000001ns", "5/m", "2/3600000000033ns"} {
		_, r := slidingCountOf(t, text)
		slot := int64(r.window) / windowSlots
		for _, width := range []int64{slot, slot + 1} {
			for offset := int64(-3); offset <= 3; offset++ {
				s, now := newSlidingCount(r), 1000*width+offset
				for range r.count {
					s.take(now)
				}
				wait, ok := s.peek(now)
				if ok || wait < r.window {
					t.Errorf("%s: full for %v", text, wait)
				}
				if _, _, ok := s.take(now + int64(r.window) - 1); ok {
					t.Errorf("%s: one more passes a nanosecond before the window is over", text)
				}
			}
		}
	}
}

// checkWindows looks at each window that begins with an admission: no other can
// hold more.
func checkWindows(t *testing.T, r rate, admitted []int64) {
	t.Helper()
	for i := int(r.count); i < len(admitted); i++ {
		if span := admitted[i] - admitted[i-int(r.count)]; span < int64(r.window) {
			t.Fatalf("%v: %d requests passed within %v, from %d on", r, r.count+1, time.Duration(span), admitted[i-int(r.count)])
		}
	}
}

// exactLog is the slow, obvious ceiling, which remembers each admission.
type exactLog struct {
	r        rate
	admitted []int64
}

func (l *exactLog) take(now int64) bool {
	for len(l.admitted) > 0 && now-l.admitted[0] >= int64(l.r.window) {
		l.admitted = l.admitted[1:]
	}
	if int64(len(l.admitted)) >= l.r.count {
		return false
	}
	l.admitted = append(l.admitted, now)
	return true
}

// A steady load gets at least 95 % of what a ceiling with unlimited memory would
// let it have, which for a load at or above the rate is 95 % of the count.
func TestCeilingSteadyLoad(t *testing.T) {
	for _, row := range []struct {
		reason string
		load   float64 // requests for each that the rate allows
	}{
		{"half of the rate", 0.5},
		{"a little below the rate", 0.99},
		{"exactly the rate", 1},
		{"a little above the rate", 1.01},
		{"half as much again", 1.5},
		{"twice the rate", 2},
		{"ten times the rate", 10},
		{"a hundred times the rate", 100},
	} {
		for _, text := range []string{
			"1/s", "2/s", "3/s", "5/s", "10/s", "30/s", "64/s", "65/s", "66/s", "100/s", "1000/s", "5000/s", "1/h", "10/m", "5000/10h", "1000/1ms",
		} {
			t.Run(row.reason+", "+text, func(t *testing.T) {
				s, r := slidingCountOf(t, text)
				exact, spacing := &exactLog{r: r}, float64(r.window)/float64(r.count)/row.load
				requests := min(max(int(float64(r.count)*row.load*10), 500), 50_000)
				var got, best int
				for n := range requests {
					// rounded up, so that a load at the rate is never above it
					now := int64(time.Hour) + int64(math.Ceil(float64(n)*spacing))
					if _, _, ok := s.take(now); ok {
						got++
					}
					if exact.take(now) {
						best++
					}
				}
				if share := float64(got) / float64(best); share < 0.95 {
					t.Errorf("%d of %d requests pass, %d would be possible: %.1f %%", got, requests, best, 100*share)
				}
			})
		}
	}
}

// However large the count, the memory is the same, and using it allocates none.
func TestCeilingMemory(t *testing.T) {
	for _, text := range []string{"1/s", "64/s", "65/s", "1000000/s", "10000000000/1d"} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		s, _ := slidingCountOf(t, text)
		runtime.ReadMemStats(&after)
		if size := after.TotalAlloc - before.TotalAlloc; size > 8192 { // whatever else ran meanwhile
			t.Errorf("%s: a ceiling takes %d bytes", text, size)
		}
		now := int64(1)
		expect(t, testing.AllocsPerRun(1000, func() {
			now += 12_345
			slot, _, _ := s.take(now)
			s.peek(now)
			s.giveBack(slot)
			s.take(now)
		}), 0, text+": allocations")
	}
}

// A ceiling counts what it admits, not what it denies: hammering costs nobody
// anything.
func TestCeilingCountsAdmissions(t *testing.T) {
	s, r := slidingCountOf(t, "100/s")
	now := int64(time.Hour)
	for round := range 10 {
		passed := 0
		for range 10_000 {
			if _, _, ok := s.take(now); ok {
				passed++
			}
			s.peek(now)
		}
		expect(t, passed, 100, fmt.Sprintf("requests pass in round %d", round+1))
		wait, _ := s.peek(now)
		if wait > r.window+r.window/windowSlots {
			t.Fatalf("a wait of %v, with a window of %v", wait, r.window)
		}
		now += int64(wait)
	}
}

// When nothing else comes, a request after exactly the wait passes, and one a
// nanosecond earlier does not.
func TestCeilingWaitIsHonest(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	for range 100 {
		r := ceilingRate(random)
		s := newSlidingCount(r)
		now := 1 + random.Int64N(int64(1000*time.Hour))
		for range 10 {
			for range 3 * r.count {
				if _, ok := s.peek(now); !ok {
					break
				}
				if _, _, ok := s.take(now); !ok {
					t.Fatalf("%v: peek said yes, and take no", r)
				}
				now += random.Int64N(int64(r.window)/(r.count+r.count/2+1) + 1)
			}
			wait, ok := s.peek(now)
			if ok {
				continue // too slow to fill it
			}
			if _, takeWait, ok := s.take(now); ok || takeWait != wait {
				t.Fatalf("%v: peek says wait %v, and take %v, %v", r, wait, takeWait, ok)
			}
			if wait <= 0 || wait > r.window+r.window/windowSlots+windowSlots {
				t.Fatalf("%v: a wait of %v", r, wait)
			}
			if _, _, ok := s.take(now + int64(wait) - 1); ok {
				t.Fatalf("%v: passes a nanosecond before its wait of %v is over", r, wait)
			}
			now += int64(wait)
			if _, _, ok := s.take(now); !ok {
				t.Fatalf("%v: does not pass after its wait of %v", r, wait)
			}
		}
	}
}

// However many come at once: exactly the count.
func TestCeilingConcurrentTakes(t *testing.T) {
	for _, count := range []int64{1, 2, 10, 64, 65, 100, 999, 1000, 1001} {
		s, _ := slidingCountOf(t, fmt.Sprintf("%d/h", count))
		passed := atOnce(1000, func(int) bool {
			_, _, ok := s.take(int64(time.Hour))
			return ok
		})
		expect(t, passed, min(count, 1000), fmt.Sprintf("requests pass below a ceiling of %d", count))
	}
}

func TestCeilingGiveBack(t *testing.T) {
	const start = int64(1000 * time.Hour)
	fill := func(s *slidingCount, n int, now int64) (slots []int64) {
		for range n {
			if slot, _, ok := s.take(now); ok {
				slots = append(slots, slot)
			}
		}
		return slots
	}
	for _, row := range []struct {
		reason string
		do     func(s *slidingCount)
		pass   int // of 100 afterwards, at start, below 10/s
	}{
		{"one given back", func(s *slidingCount) { s.giveBack(fill(s, 10, start)[3]) }, 1},
		{"all given back", func(s *slidingCount) {
			for _, slot := range fill(s, 10, start) {
				s.giveBack(slot)
			}
		}, 10},
		{"given back half a window later", func(s *slidingCount) {
			slots := fill(s, 10, start-int64(500*time.Millisecond))
			s.peek(start)
			s.giveBack(slots[0])
		}, 1},
		{"given back in the last moment of its window", func(s *slidingCount) {
			slots := fill(s, 4, start-int64(time.Second)+1)
			fill(s, 6, start)
			s.giveBack(slots[0])
		}, 1},
		{"given back when its window has passed: nothing is left to give", func(s *slidingCount) {
			slots := fill(s, 10, start-int64(2*time.Second))
			fill(s, 10, start)
			for _, slot := range slots {
				s.giveBack(slot)
			}
		}, 0},
		{"given back when many windows have passed", func(s *slidingCount) {
			slots := fill(s, 10, start-int64(100*time.Hour))
			fill(s, 10, start)
			for _, slot := range slots {
				s.giveBack(slot)
			}
		}, 0},
	} {
		s, _ := slidingCountOf(t, "10/s")
		row.do(s)
		expect(t, len(fill(s, 100, start)), row.pass, row.reason+": requests pass")
	}
}

// Taking and giving back at the same time loses nothing and admits nothing more.
func TestCeilingConcurrentGiveBack(t *testing.T) {
	s, _ := slidingCountOf(t, "500/h")
	var holding, most atomic.Int64
	atOnce(2000, func(n int) bool {
		slot, _, ok := s.take(int64(time.Hour))
		if !ok {
			return false
		}
		for now := holding.Add(1); ; {
			if before := most.Load(); now <= before || most.CompareAndSwap(before, now) {
				break
			}
		}
		holding.Add(-1)
		s.giveBack(slot)
		return true
	})
	if most.Load() > 500 {
		t.Errorf("%d requests were admitted at the same time", most.Load())
	}
	passed := atOnce(2000, func(int) bool {
		_, _, ok := s.take(int64(time.Hour))
		return ok
	})
	expect(t, passed, 500, "requests pass when all was given back")
}

// Callers may arrive in another order than they read the clock in. Whoever comes
// with an old reading is counted where the newest one stands, so that no window
// of what really happened holds more than the count, and no slot comes back.
func TestCeilingClockOutOfOrder(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 8))
	for range 60 {
		r := ceilingRate(random)
		s := newSlidingCount(r)
		clock := 1 + random.Int64N(int64(1000*time.Hour))
		newest := int64(0)
		var admitted []int64
		for range min(5*r.count+100, 5_000) {
			clock += random.Int64N(int64(r.window)/(2*r.count) + 2)
			reading := clock
			switch random.IntN(10) {
			case 0: // held up for up to half a window
				reading = max(clock-random.Int64N(int64(r.window)/2), 1)
			case 1: // for several windows
				reading = max(clock-random.Int64N(5*int64(r.window)), 1)
			}
			newest = max(newest, reading)
			_, wait, ok := s.take(reading)
			if ok {
				admitted = append(admitted, newest)
			} else if wait <= 0 {
				t.Fatalf("%v: a wait of %v", r, wait)
			}
		}
		if !slices.IsSorted(admitted) {
			t.Fatal("the test is wrong")
		}
		checkWindows(t, r, admitted)
	}
}

// Who comes with an old reading is told a wait that is honest from the newest one
// on, which is about when he hears of it.
func TestCeilingWaitOfOldReading(t *testing.T) {
	for _, text := range []string{"1/s", "100/s"} {
		s, r := slidingCountOf(t, text)
		now := int64(time.Hour)
		for range r.count {
			s.take(now)
		}
		_, wait, ok := s.take(now - int64(300*time.Millisecond))
		expect(t, ok, false, "passes")
		if wait < r.window || wait > r.window+r.window/cuts+300*time.Millisecond {
			t.Errorf("%s: a wait of %v", text, wait)
		}
		if _, ok := s.peek(now + int64(wait)); !ok {
			t.Errorf("%s: does not pass after its wait", text)
		}
	}
}

// Other numbers: what was used stays used, as if it had been used just now, so
// that the new window holds from the first moment.
func TestCeilingAdopts(t *testing.T) {
	for _, row := range []struct {
		reason        string
		before, after string
		used, left    int
	}{
		{"the same numbers", "5/m", "5/m", 3, 2},
		{"a longer window: used up stays used up", "5/m", "5/h", 5, 0},
		{"a shorter window: used up stays used up", "5/h", "5/m", 5, 0},
		{"a higher count: the difference", "5/m", "8/m", 5, 3},
		{"a lower count: nothing", "50/m", "5/m", 20, 0},
		{"a lower count, hardly used", "50/m", "5/m", 2, 3},
		{"nothing used", "50/m", "5/h", 0, 5},
		{"many: the same numbers", "500/m", "500/m", 300, 200},
		{"many: a longer window", "500/m", "500/h", 500, 0},
		{"many: a shorter window", "500/h", "500/m", 500, 0},
		{"many: a higher count", "500/m", "800/m", 500, 300},
		{"many: a lower count", "5000/m", "500/m", 2000, 0},
		{"many: a lower count, hardly used", "5000/m", "500/m", 200, 300},
		{"few become many", "50/m", "500/m", 50, 450},
		{"many become few", "500/m", "50/m", 40, 10},
		{"many become few, used up", "500/m", "50/m", 500, 0},
	} {
		s, _ := slidingCountOf(t, row.before)
		now := int64(1000 * time.Hour)
		for range row.used {
			s.take(now)
			now++
		}
		after, err := parseRate(row.after)
		if err != nil {
			t.Fatal(err)
		}
		s.adopt(after, now)
		s.adopt(after, now+1) // once is enough
		passed := 0
		for range row.left + 10 {
			if _, _, ok := s.take(now + 2); ok {
				passed++
			}
		}
		expect(t, passed, row.left, row.reason+": requests are left")
		wait, _ := s.peek(now + 2)
		if longest := after.window + after.window/windowSlots + windowSlots; wait > longest {
			t.Errorf("%s: a wait of %v, longer than %v", row.reason, wait, longest)
		}
		now += 2 + int64(wait)
		if row.before != row.after {
			now += int64(after.window)
		}
		if _, ok := s.peek(now); !ok {
			t.Errorf("%s: still denied after a window", row.reason)
		}
	}
}

func TestCeilingUsedRatio(t *testing.T) {
	s, r := slidingCountOf(t, "4/s")
	now := int64(time.Hour)
	expect(t, s.usedRatio(now), 0, "before the first request")
	for n := range 8 {
		s.take(now)
		expect(t, s.usedRatio(now), min(float64(n+1)/4, 1), fmt.Sprintf("after %d requests", n+1))
	}
	now += int64(r.window)
	expect(t, s.usedRatio(now+int64(r.window)/windowSlots), 0, "a window later")
}

// Times as far away as they can be: nothing overflows.
func TestCeilingExtremes(t *testing.T) {
	for _, text := range []string{"1/1ms", "1/3650d", "1000/1ms", "300000000000000/3650d"} {
		s, r := slidingCountOf(t, text)
		for _, now := range []int64{1, int64(time.Hour), int64(maxWindow), int64(maxToleranceInTime)} {
			if _, _, ok := s.take(now); !ok && r.count > 1 {
				t.Errorf("%s at %v: denied", text, time.Duration(now))
			}
			if wait, ok := s.peek(now); !ok && (wait <= 0 || wait > r.window+r.window/32) {
				t.Errorf("%s at %v: a wait of %v", text, time.Duration(now), wait)
			}
		}
	}
}
