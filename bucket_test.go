package edgelimit

import (
	"context"
	"fmt"
	"math/big"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/edgelimit/caddy-edgelimit/internal/table"
)

// bucket is the arithmetic of a limit over a table of its own, for requests of
// cost 1.
type bucket struct {
	gcra
	table *table.Table
}

// bucketOf makes one of a rate; a burst of 0 is the rate's count.
func bucketOf(t *testing.T, text string, burst int64) bucket {
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
	return bucket{g, table.New(100_000)}
}

func (b bucket) peek(key uint64, now int64) (time.Duration, bool) {
	return b.gcra.peek(b.table, key, b.increment(1), now)
}

func (b bucket) take(key uint64, now int64) (own int64, wait time.Duration, ok bool) {
	return b.gcra.take(b.table, key, b.increment(1), now)
}

func (b bucket) giveBack(key uint64, own, now int64) {
	b.gcra.giveBack(b.table, key, b.increment(1), own, now)
}

func TestGCRA(t *testing.T) {
	const ms = time.Millisecond
	type step struct {
		at   time.Duration // since the start
		n    int           // requests at that moment
		pass int           // of these
		wait time.Duration // of the first that does not
	}
	for _, row := range []struct {
		reason string
		rate   string
		burst  int64
		steps  []step
	}{
		{"the burst at once, then nothing", "10/s", 0, []step{{0, 20, 10, 100 * ms}}},
		{"a burst of one", "10/s", 1, []step{{0, 3, 1, 100 * ms}, {100 * ms, 3, 1, 100 * ms}}},
		{"a burst above the count", "10/s", 25, []step{{0, 30, 25, 100 * ms}}},
		{"one emission interval refills one", "10/s", 0, []step{{0, 10, 10, 0}, {100 * ms, 2, 1, 100 * ms}}},
		{"one nanosecond less refills none", "10/s", 0, []step{{0, 10, 10, 0}, {100*ms - 1, 1, 0, 1}, {100 * ms, 1, 1, 0}}},
		{"a half refills half", "10/s", 0, []step{{0, 10, 10, 0}, {500 * ms, 10, 5, 100 * ms}}},
		{"denied requests cost nothing", "10/s", 0, []step{{0, 1000, 10, 100 * ms}, {99 * ms, 1000, 0, 1 * ms}, {100 * ms, 2, 1, 100 * ms}}},
		{"a window refills all", "10/s", 0, []step{{0, 10, 10, 0}, {time.Second, 20, 10, 100 * ms}}},
		{"and no more, however long it takes", "10/s", 0, []step{{0, 10, 10, 0}, {24 * time.Hour, 20, 10, 100 * ms}}},
		{"a budget that is half used refills to the burst only", "10/s", 0, []step{{0, 5, 5, 0}, {900 * ms, 20, 10, 100 * ms}}},
		{"evenly spaced requests pass for ever", "10/s", 1, []step{
			{0, 1, 1, 0}, {100 * ms, 1, 1, 0}, {200 * ms, 1, 1, 0}, {300 * ms, 1, 1, 0}, {400 * ms, 2, 1, 100 * ms}}},
		{"a little too fast, and the burst is eaten up", "10/s", 2, []step{
			{0, 1, 1, 0}, {60 * ms, 1, 1, 0}, {120 * ms, 1, 1, 0}, {180 * ms, 1, 0, 20 * ms}, {200 * ms, 1, 1, 0}}},
		{"an interval that is no whole number is rounded up", "3/s", 0, []step{
			{0, 4, 3, 333_333_334}, {333_333_333, 1, 0, 1}, {333_333_334, 1, 1, 0}}},
		{"few a day", "1/1d", 0, []step{{0, 2, 1, 24 * time.Hour}, {24*time.Hour - 1, 1, 0, 1}, {24 * time.Hour, 1, 1, 0}}},
		{"the longest window", "1/3650d", 10, []step{{0, 11, 10, maxWindow}, {maxWindow, 2, 1, maxWindow}}},
		{"the highest rate", "1000000/s", 1, []step{{0, 2, 1, time.Microsecond}, {time.Microsecond, 2, 1, time.Microsecond}}},
		{"a clock reading that is older than the last one", "10/s", 2, []step{
			{time.Second, 2, 2, 0}, {900 * ms, 1, 0, 200 * ms}, {time.Second, 1, 0, 100 * ms}, {1100 * ms, 1, 1, 0}}},
	} {
		t.Run(row.reason, func(t *testing.T) {
			b := bucketOf(t, row.rate, row.burst)
			const key, start = 7, int64(time.Hour)
			for _, s := range row.steps {
				now, passed := start+int64(s.at), 0
				for n := range s.n {
					peekWait, peekOK := b.peek(key, now)
					_, wait, ok := b.take(key, now)
					if peekOK != ok || !ok && peekWait != wait {
						t.Errorf("at %v: peek says %v, %v, and take %v, %v", s.at, peekWait, peekOK, wait, ok)
					}
					if ok {
						passed++
					} else if n == s.pass {
						expect(t, wait, s.wait, fmt.Sprintf("at %v: wait", s.at))
					}
				}
				expect(t, passed, s.pass, fmt.Sprintf("at %v: of %d requests pass", s.at, s.n))
			}
		})
	}
}

// Peeking is free, and keys know nothing of one another.
func TestPeekAndKeys(t *testing.T) {
	b, now := bucketOf(t, "2/s", 0), int64(1)
	for range 100 {
		if _, ok := b.peek(1, now); !ok {
			t.Fatal("peeking was charged")
		}
	}
	expect(t, b.table.Len(), 0, "keys after peeking")
	for key := range uint64(50) {
		for n := range 4 {
			_, _, ok := b.take(key+1, now)
			expect(t, ok, n < 2, fmt.Sprintf("key %d, request %d", key+1, n+1))
		}
	}
}

// tokenBucket is the slow, obvious model: tokens as exact fractions, refilled
// with time. It has no TAT, no tolerance and no rounding.
type tokenBucket struct {
	burst, tokens *big.Rat
	perToken      *big.Rat // nanoseconds
	last          int64
}

func newTokenBucket(perToken *big.Rat, burst, now int64) *tokenBucket {
	full := new(big.Rat).SetInt64(burst)
	return &tokenBucket{burst: full, tokens: new(big.Rat).Set(full), perToken: perToken, last: now}
}

func (b *tokenBucket) refill(now int64) {
	elapsed := new(big.Rat).SetInt64(now - b.last)
	b.tokens.Add(b.tokens, elapsed.Quo(elapsed, b.perToken))
	if b.tokens.Cmp(b.burst) > 0 {
		b.tokens.Set(b.burst)
	}
	b.last = now
}

func (b *tokenBucket) take(now int64) bool {
	b.refill(now)
	one := big.NewRat(1, 1)
	if b.tokens.Cmp(one) < 0 {
		return false
	}
	b.tokens.Sub(b.tokens, one)
	return true
}

func (b *tokenBucket) giveBack(now int64) {
	b.refill(now)
	b.tokens.Add(b.tokens, big.NewRat(1, 1))
	b.refill(now)
}

// Over a random run a limit decides as the model with the same emission interval
// does, each time, and its wait is exact: a request after just so long passes,
// and one a nanosecond earlier does not.
func TestSameAsTokenBucket(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	denied := 0
	for range 100 {
		r := randomRate(random)
		burst := 1 + random.Int64N(20)
		if random.IntN(4) == 0 {
			burst = r.count
		}
		g, err := newGCRA(r, burst)
		if err != nil {
			continue // more than 100 years
		}
		b, key, now := bucket{g, table.New(10)}, random.Uint64(), 1+random.Int64N(int64(1000*time.Hour))
		model := newTokenBucket(new(big.Rat).SetInt64(g.emissionInterval), burst, now)
		for n := range 300 {
			what := fmt.Sprintf("%v with a burst of %d, request %d at %d", r, burst, n, now)
			own, wait, ok := b.take(key, now)
			if ok != model.take(now) {
				t.Fatalf("%s: passes: %v, and the model says otherwise", what, ok)
			}
			if !ok {
				denied++
				if wait <= 0 || wait > time.Duration(g.emissionInterval) {
					t.Fatalf("%s: wait of %v, with an emission interval of %v", what, wait, time.Duration(g.emissionInterval))
				}
				if _, early := b.peek(key, now+int64(wait)-1); early {
					t.Fatalf("%s: passes one nanosecond before its wait of %v is over", what, wait)
				}
				if _, late := b.peek(key, now+int64(wait)); !late {
					t.Fatalf("%s: does not pass after its wait of %v", what, wait)
				}
			} else if random.IntN(10) == 0 {
				later := now + random.Int64N(g.emissionInterval)
				b.giveBack(key, own, later)
				model.giveBack(later)
				now = later
			}
			switch random.IntN(6) {
			case 0: // at once
			case 1:
				now += random.Int64N(g.emissionInterval * min(burst, 5))
			case 2:
				now += g.emissionInterval
			case 3:
				now += int64(wait)
			case 4:
				now += max(int64(wait)-1, 0)
			default:
				now += random.Int64N(g.emissionInterval + 1)
			}
		}
	}
	if denied < 1000 {
		t.Errorf("%d of 30000 requests were denied, so little was tested", denied)
	}
}

// randomRate is any rate that a configuration can have.
func randomRate(random *rand.Rand) rate {
	for {
		window := time.Duration(random.Int64N(int64(1) << (20 + random.IntN(30))))
		count := 1 + random.Int64N(int64(1)<<random.IntN(14))
		r, err := parseRate(fmt.Sprintf("%d/%v", count, window))
		if err == nil {
			return r
		}
	}
}

// Rounding the emission interval never admits more than the rate says, in exact
// fractions: over any span, the burst and what the rate makes of the span.
func TestNeverAboveRate(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		r := randomRate(random)
		burst := 1 + random.Int64N(10)
		g, err := newGCRA(r, burst)
		if err != nil {
			continue
		}
		b, start := bucket{g, table.New(10)}, int64(time.Hour)
		exact := new(big.Rat).SetFrac64(int64(r.window), r.count) // nanoseconds a request
		var now, passed int64 = start, 0
		for range 500 {
			_, wait, ok := b.take(1, now)
			if !ok {
				now += int64(wait)
				continue
			}
			passed++
			allowed := new(big.Rat).Quo(new(big.Rat).SetInt64(now-start), exact)
			allowed.Add(allowed, new(big.Rat).SetInt64(burst))
			if new(big.Rat).SetInt64(passed).Cmp(allowed) > 0 {
				t.Fatalf("%v with a burst of %d: %d requests in %v", r, burst, passed, time.Duration(now-start))
			}
		}
	}
}

// In a first window up to twice the count passes: the burst, and what is refilled
// meanwhile. Never more, in no window.
func TestFirstWindow(t *testing.T) {
	for _, text := range []string{"1/s", "2/s", "10/s", "10/m", "60/m", "100/h", "5/1ms", "7/s"} {
		b := bucketOf(t, text, 0)
		r, _ := parseRate(text)
		start := int64(time.Hour)
		var admitted []int64
		for now := start; now <= start+3*int64(r.window); {
			_, wait, ok := b.take(1, now)
			if ok {
				admitted = append(admitted, now)
			}
			now += int64(wait)
		}
		inFirst := func(window int64) (n int64) {
			for _, at := range admitted {
				if at-start < window {
					n++
				}
			}
			return n
		}
		expect(t, inFirst(int64(r.window)), 2*r.count-1, text+": requests pass in the first window")
		for i := range admitted {
			if j := i + int(2*r.count); j < len(admitted) && admitted[j]-admitted[i] < int64(r.window) {
				t.Errorf("%s: more than twice the count in the window from request %d on", text, i)
			}
		}
	}
}

// However many come at once to one key: exactly the burst.
func TestConcurrentTakes(t *testing.T) {
	for _, burst := range []int64{1, 2, 10, 100, 999, 1000, 1001} {
		b := bucketOf(t, "1/h", burst)
		passed := atOnce(1000, func(int) bool {
			_, _, ok := b.take(42, int64(time.Hour))
			return ok
		})
		expect(t, passed, min(burst, 1000), fmt.Sprintf("requests pass with a burst of %d", burst))
	}
}

// The same beside other keys that come and go. Keys are hashes: they are evenly
// distributed.
func TestConcurrentTakesAmongOthers(t *testing.T) {
	b, key := bucketOf(t, "1/h", 100), rand.Uint64()
	passed := atOnce(1000, func(int) bool {
		for range 20 {
			b.take(rand.Uint64(), int64(time.Hour))
		}
		_, _, ok := b.take(key, int64(time.Hour))
		return ok
	})
	expect(t, passed, 100, "requests of the one key pass")
}

// atOnce runs f in n goroutines and says how many of them got true.
func atOnce(n int, f func(int) bool) int64 {
	var passed atomic.Int64
	var start, done sync.WaitGroup
	start.Add(1)
	for i := range n {
		done.Go(func() {
			start.Wait()
			if f(i) {
				passed.Add(1)
			}
		})
	}
	start.Done()
	done.Wait()
	return passed.Load()
}

func TestGiveBack(t *testing.T) {
	const start = int64(time.Hour)
	take := func(b bucket, key uint64) int64 { own, _, _ := b.take(key, start); return own }
	for _, row := range []struct {
		reason string
		do     func(b bucket)
		pass   int // of ten afterwards, at start, with a rate of 4/s
	}{
		{"nothing was taken: nothing is given", func(b bucket) { b.giveBack(1, start+b.emissionInterval, start) }, 4},
		{"one taken and given back", func(b bucket) { b.giveBack(1, take(b, 1), start) }, 4},
		{"two taken, one given back", func(b bucket) { take(b, 1); b.giveBack(1, take(b, 1), start) }, 3},
		{"two taken, the first one given back", func(b bucket) { own := take(b, 1); take(b, 1); b.giveBack(1, own, start) }, 3},
		{"one taken, given back twice: no more than was owed", func(b bucket) {
			own := take(b, 1)
			b.giveBack(1, own, start)
			b.giveBack(1, own, start)
		}, 4},
		{"all taken, all given back", func(b bucket) {
			var owns []int64
			for range 4 {
				owns = append(owns, take(b, 1))
			}
			for _, own := range owns {
				b.giveBack(1, own, start)
			}
		}, 4},
		{"another key's is no business of this one", func(b bucket) { take(b, 1); b.giveBack(2, take(b, 2), start) }, 3},
		{"what has decayed is not given back: the second one's debt stays", func(b bucket) {
			own, _, _ := b.take(1, start-b.emissionInterval)
			take(b, 1)
			b.giveBack(1, own, start)
		}, 3},
		{"half of it has decayed: half is given back", func(b bucket) {
			own, _, _ := b.take(1, start-b.emissionInterval/2)
			b.giveBack(1, own, start)
		}, 4},
		{"a key that was forgotten gets nothing", func(b bucket) {
			own := take(b, 1)
			b.table.Delete(1)
			b.giveBack(1, own, start)
			take(b, 1)
		}, 3},
	} {
		b := bucketOf(t, "4/s", 0)
		row.do(b)
		passed := 0
		for range 10 {
			if _, _, ok := b.take(1, start); ok {
				passed++
			}
		}
		expect(t, passed, row.pass, row.reason)
	}
}

// attempt is a request whose answer the test gives when it likes.
type attempt struct {
	passed bool // the upstream has it
	answer chan int
	done   chan struct{}
}

// begin sends a request, and returns when it has reached the upstream or was
// denied.
func (i *instance) begin(t *testing.T, peer string) *attempt {
	a := &attempt{answer: make(chan int), done: make(chan struct{})}
	reached := make(chan struct{})
	go func() {
		defer close(a.done)
		w, r := httptest.NewRecorder(), requestFrom(peer, "/")
		r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, &net.TCPAddr{}))
		r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, i.server)
		err := i.handlers[0].ServeHTTP(w, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
			close(reached)
			w.WriteHeader(<-a.answer)
			return nil
		}))
		if err != nil {
			t.Error(err)
		}
	}()
	select {
	case <-reached:
		a.passed = true
	case <-a.done:
	}
	return a
}

// end lets the upstream answer.
func (a *attempt) end(status int) {
	if a.passed {
		a.answer <- status
		<-a.done
	}
}

// A right attempt is given back what it was charged, but not what others owe:
// two right ones with slow answers must not make room for more wrong ones than
// the budget. The first is given back at once, which moves the second one's debt
// to its place in time; when that one is given back later, it has decayed.
func TestGiveBackOfSlowAnswer(t *testing.T) {
	i := newInstance(t, `http://test.local {
	edge_limit {
		limit attempts 2/2s {
			on_status 401
		}
	}
}`)
	first, second := i.begin(t, alice), i.begin(t, alice)
	first.end(200)
	i.sleep(time.Second)
	third := i.begin(t, alice)
	third.end(401)
	second.end(200)
	fourth, fifth := i.begin(t, alice), i.begin(t, alice)
	fourth.end(401)
	fifth.end(401)
	wrong := 0
	for _, a := range []*attempt{third, fourth, fifth} {
		if a.passed {
			wrong++
		}
	}
	expect(t, wrong, 2, "wrong attempts of one moment pass, with a budget of two")
}

// Give-backs never add up to more than was taken: however late and in whatever
// order, what was kept is never more than burst and rate allow.
func TestGiveBackAddsUp(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 2))
	const interval = int64(100 * time.Millisecond)
	for run := range 50 {
		burst := 1 + random.Int64N(6)
		i := newInstance(t, fmt.Sprintf(`http://test.local {
	edge_limit {
		limit attempts 10/s {
			burst %d
			on_status 401
		}
	}
}`, burst))
		var kept []int64 // when attempts came that turned out to be wrong
		var open []*attempt
		for range 150 {
			for len(open) > 0 && random.IntN(3) == 0 {
				n := random.IntN(len(open))
				open[n].end(200)
				open = append(open[:n], open[n+1:]...)
			}
			a := i.begin(t, alice)
			switch {
			case !a.passed:
			case random.IntN(2) == 0:
				open = append(open, a)
			default:
				a.end(401)
				kept = append(kept, i.now.Load())
			}
			i.sleep(time.Duration(random.Int64N(interval * 2 / 3)))
		}
		for _, a := range open {
			a.end(200)
		}
		for i := range kept {
			for j := i; j < len(kept); j++ {
				if sum, most := int64(j-i+1), burst+(kept[j]-kept[i])/interval; sum > most {
					t.Fatalf("run %d, a burst of %d: %d wrong attempts within %v, %d are allowed", run, burst, sum, time.Duration(kept[j]-kept[i]), most)
				}
			}
		}
		i.stop()
	}
}

// Taking and giving back at the same time ends where it should.
func TestConcurrentGiveBack(t *testing.T) {
	b := bucketOf(t, "1/h", 5000)
	taken := atOnce(1000, func(n int) bool {
		own, _, ok := b.take(1, int64(time.Hour))
		if ok && n%2 == 0 {
			b.giveBack(1, own, int64(time.Hour))
		}
		return ok
	})
	expect(t, taken, 1000, "requests pass")
	expect(t, (b.table.Peek(1, 0)-int64(time.Hour))/b.emissionInterval, 500, "requests are owed")
}

// A request may cost more than one, or less.
func TestCost(t *testing.T) {
	const start = int64(time.Hour)
	for _, row := range []struct {
		reason string
		cost   float64
		pass   int // of 1000 at once, with 4/s
		wait   time.Duration
	}{
		{"one", 1, 4, 250 * time.Millisecond},
		{"two: half as many", 2, 2, 500 * time.Millisecond},
		{"three: one, and what is left is too little", 3, 1, 500 * time.Millisecond},
		{"the whole burst", 4, 1, time.Second},
		{"a half: twice as many", 0.5, 8, 125 * time.Millisecond},
		{"more than the burst can never pass, and no waiting helps", 5, 0, 0},
		{"a little more than the burst", 4.000000001, 0, 0},
		{"far more", 1e300, 0, 0},
		{"next to nothing is not nothing", 1e-300, 1000, 0},
	} {
		b := bucketOf(t, "4/s", 0)
		passed, increment := 0, b.increment(row.cost)
		for range 1000 {
			peekWait, peekOK := b.gcra.peek(b.table, 1, increment, start)
			_, wait, ok := b.gcra.take(b.table, 1, increment, start)
			if peekOK != ok || peekWait != wait {
				t.Fatalf("%s: peek says %v, %v, and take %v, %v", row.reason, peekWait, peekOK, wait, ok)
			}
			if ok {
				passed++
			} else if wait != row.wait {
				t.Fatalf("%s: wait of %v, want %v", row.reason, wait, row.wait)
			}
		}
		expect(t, passed, row.pass, row.reason)
		if _, ok := b.gcra.peek(b.table, 1, increment, start+int64(row.wait)); !ok && row.wait > 0 {
			t.Errorf("%s: does not pass after its wait", row.reason)
		}
	}
}

// When a limit's numbers change, who had used his budget up has used it up, and
// is not blocked for longer than the new numbers say.
func TestRescaled(t *testing.T) {
	// More than the numbers before could have made, as if others had made it: no
	// more than these can.
	before, after := bucketOf(t, "1000/s", 0), bucketOf(t, "1/3650d", 0)
	expect(t, after.rescaled(1+after.tolerance, before.gcra, 1), 1+after.tolerance, "a debt that would be an age of the world")

	const start = int64(time.Hour)
	for _, row := range []struct {
		reason        string
		before, after string
		used, left    int // requests before, and possible afterwards
	}{
		{"the same numbers", "6/m", "6/m", 2, 4},
		{"slower: used up stays used up", "5/m", "5/h", 5, 0},
		{"faster: used up stays used up", "5/h", "5/m", 5, 0},
		{"more: used up stays used up", "5/m", "50/m", 5, 0},
		{"fewer: used up stays used up", "50/m", "5/m", 50, 0},
		{"half used stays half used", "10/m", "100/h", 5, 50},
		{"by the smallest numbers and the largest: used up stays used up", "1000000/s", "1/3650d", 1000000, 0},
		{"nothing used", "10/m", "3/s", 0, 3},
	} {
		before, after := bucketOf(t, row.before, 0), bucketOf(t, row.after, 0)
		for range row.used {
			before.take(1, start)
		}
		tat := after.rescaled(before.table.Peek(1, start), before.gcra, start)
		after.table.Set(1, start, tat)
		passed := 0
		for range row.left + 10 {
			if _, _, ok := after.take(1, start); ok {
				passed++
			}
		}
		expect(t, passed, row.left, row.reason+": requests are left")
		if wait, _ := after.peek(1, start); int64(wait) > after.emissionInterval {
			t.Errorf("%s: blocked for %v, with an emission interval of %v", row.reason, wait, time.Duration(after.emissionInterval))
		}
	}
}

func TestRemaining(t *testing.T) {
	b, start := bucketOf(t, "4/s", 0), int64(time.Hour)
	expect(t, b.remaining(0, start), 4, "of an unknown key")
	for n := range 6 {
		b.take(1, start)
		expect(t, b.remaining(b.table.Peek(1, start), start), max(0, 3-int64(n)), fmt.Sprintf("after %d requests", n+1))
	}
	expect(t, b.remaining(b.table.Peek(1, start), start+b.emissionInterval-1), 0, "a nanosecond before one is refilled")
	expect(t, b.remaining(b.table.Peek(1, start), start+b.emissionInterval), 1, "when one is refilled")
	expect(t, b.remaining(b.table.Peek(1, start), start+int64(time.Hour)), 4, "long after")
}

// Retry-After: whole seconds, rounded up, at least one.
func TestRetryAfter(t *testing.T) {
	for _, row := range []struct {
		wait time.Duration
		want int64
	}{
		{1, 1},
		{time.Millisecond, 1},
		{time.Second - 1, 1},
		{time.Second, 1},
		{time.Second + 1, 2},
		{90 * time.Second, 90},
		{90*time.Second + 1, 91},
		{24 * time.Hour, 86_400},
		{maxWindow, 315_360_000},
		{maxToleranceInTime, 3_153_600_000},
	} {
		expect(t, retryAfter(row.wait), row.want, fmt.Sprintf("Retry-After for a wait of %v", row.wait))
	}
	random := rand.New(rand.NewPCG(3, 4))
	for range 10_000 {
		wait := 1 + random.Int64N(int64(1)<<(1+random.IntN(60)))
		seconds := retryAfter(time.Duration(wait))
		if seconds < 1 || seconds*int64(time.Second) < wait || (seconds-1)*int64(time.Second) >= wait {
			t.Fatalf("Retry-After %d for a wait of %v", seconds, time.Duration(wait))
		}
	}
}

// A burst that nobody would see refilled is refused, and no arithmetic overflows
// on the way.
func TestBurstBounds(t *testing.T) {
	for _, row := range []struct {
		rate  string
		burst int64
		ok    bool
	}{
		{"1/s", 0, false},
		{"1/s", -1, false},
		{"1/s", 1, true},
		{"1/1d", 36_500, true},
		{"1/1d", 36_501, false},
		{"1/3650d", 10, true},
		{"1/3650d", 11, false},
		{"1/s", 1 << 62, false},
		{"1/3650d", 1<<63 - 1, false},
		{"1000000/s", 1<<63 - 1, false},
	} {
		r, err := parseRate(row.rate)
		if err != nil {
			t.Fatal(err)
		}
		g, err := newGCRA(r, row.burst)
		expect(t, err == nil, row.ok, fmt.Sprintf("%s with a burst of %d loads", row.rate, row.burst))
		if err == nil && g.tolerance < g.emissionInterval {
			t.Errorf("%s with a burst of %d: tolerance %d", row.rate, row.burst, g.tolerance)
		}
	}
}
