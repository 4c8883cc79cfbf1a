package bench

import (
	"context"
	"net/netip"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/dchest/siphash"
	"github.com/go-chi/httprate"
	"github.com/sethvargo/go-limiter/memorystore"
	"github.com/throttled/throttled/v2"
	"github.com/throttled/throttled/v2/store/memstore"
	"github.com/ulule/limiter/v3"
	"github.com/ulule/limiter/v3/drivers/store/memory"
	"golang.org/x/time/rate"

	"github.com/edgelimit/caddy-edgelimit/internal/table"
)

// budget is what all limiters are given: count requests at once, and count in
// window over time.
type budget struct {
	count  int
	window time.Duration
}

// exhausted is used up by the first request.
var exhausted = budget{1, 24 * time.Hour}

// endless is a budget that no benchmark uses up. Each key owes something for as
// long as the benchmark lasts, so that no limiter may forget it: many keys for
// 100 seconds after each of their few requests, a hot key forever.
func endless(keys int) budget {
	if keys == 1 {
		return budget{3_000_000_000, 3_000_000_000 * time.Second}
	}
	return budget{30_000_000, 30_000_000 * 100 * time.Second}
}

// decide is one decision: a key goes in, and whether it may pass and how long it
// must wait if not comes out. Each limiter reads its clock and hashes its key.
type decide[K any] func(key K) (wait time.Duration, ok bool)

// limiterMakers make the limiters that are compared, for so many keys.
var limiterMakers = []struct {
	name      string
	byString  func(tb testing.TB, b budget, keys int) decide[string]
	byAddress func(tb testing.TB, b budget, keys int) decide[netip.Addr]
}{
	{name: "edge_limit", byAddress: edgeLimitByAddress},
	{name: "edge_limit-string", byString: edgeLimitByString},
	{name: "xtimerate-syncmap", byString: rateInSyncMap},
	{name: "xtimerate-mutexmap", byString: rateInMutexMap},
	{name: "throttled", byString: throttledMap},
	{name: "go-limiter", byString: goLimiter},
	{name: "ulule", byString: ululeLimiter},
	{name: "httprate", byString: httprateCounter},
}

// edgeLimit does what the product's key.go and bucket.go do with a key: an
// address behind a tag, or a text, is hashed with a secret, and looked up in the
// table. BenchmarkDecision in the root package measures the product's own code.
type edgeLimit struct {
	buckets              *table.Table
	increment, tolerance int64
	start                time.Time
}

const k0, k1, k2, k3 = 0x0706050403020100, 0x0f0e0d0c0b0a0908, 0x1716151413121110, 0x1f1e1d1c1b1a1918

func newEdgeLimit(b budget, keys int) *edgeLimit {
	maxKeys := max(1000, keys+keys/10) // room for all: a full table would forget some
	increment := int64(b.window) / int64(b.count)
	return &edgeLimit{
		buckets: table.New(maxKeys), increment: increment, tolerance: increment * int64(b.count),
		start: time.Now().Add(-time.Hour),
	}
}

func (l *edgeLimit) decide(key uint64) (wait time.Duration, ok bool) {
	now := int64(time.Since(l.start))
	tat, ok := l.buckets.Add(key, now, l.increment, l.tolerance)
	if ok {
		return 0, true
	}
	return time.Duration(max(tat, now) - now + l.increment - l.tolerance), false
}

func edgeLimitByAddress(_ testing.TB, b budget, keys int) decide[netip.Addr] {
	l := newEdgeLimit(b, keys)
	return func(key netip.Addr) (time.Duration, bool) {
		var space [17]byte
		material := space[:0]
		if key.Is4() {
			field := key.As4()
			material = append(append(material, 1), field[:]...)
		} else {
			field := key.As16()
			material = append(append(material, 2), field[:]...)
		}
		return l.decide(siphash.Hash(k0, k1, material))
	}
}

func edgeLimitByString(_ testing.TB, b budget, keys int) decide[string] {
	l := newEdgeLimit(b, keys)
	return func(key string) (time.Duration, bool) {
		return l.decide(siphash.Hash(k2, k3, unsafe.Slice(unsafe.StringData(key), len(key))))
	}
}

// x/time/rate knows one budget: its users keep a limiter for each key.
func rateDecide(l *rate.Limiter) (time.Duration, bool) {
	now := time.Now()
	if l.AllowN(now, 1) {
		return 0, true
	}
	return time.Duration((1 - l.TokensAt(now)) / float64(l.Limit()) * float64(time.Second)), false
}

func newRate(b budget) *rate.Limiter {
	return rate.NewLimiter(rate.Limit(float64(b.count)/b.window.Seconds()), b.count)
}

func rateInSyncMap(_ testing.TB, b budget, _ int) decide[string] {
	var limiters sync.Map
	return func(key string) (time.Duration, bool) {
		l, ok := limiters.Load(key)
		if !ok {
			l, _ = limiters.LoadOrStore(key, newRate(b))
		}
		return rateDecide(l.(*rate.Limiter))
	}
}

func rateInMutexMap(_ testing.TB, b budget, _ int) decide[string] {
	var mu sync.Mutex
	limiters := make(map[string]*rate.Limiter)
	return func(key string) (time.Duration, bool) {
		mu.Lock()
		l, ok := limiters[key]
		if !ok {
			l = newRate(b)
			limiters[key] = l
		}
		mu.Unlock()
		return rateDecide(l)
	}
}

func throttledMap(tb testing.TB, b budget, _ int) decide[string] {
	store, err := memstore.NewCtx(0)
	if err != nil {
		tb.Fatal(err)
	}
	quota := throttled.RateQuota{MaxRate: throttled.PerDuration(b.count, b.window), MaxBurst: b.count - 1}
	l, err := throttled.NewGCRARateLimiterCtx(store, quota)
	if err != nil {
		tb.Fatal(err)
	}
	ctx := context.Background()
	return func(key string) (time.Duration, bool) {
		// It gives up after ten attempts where others are at the same key. A decision is
		// wanted all the same, so it is asked again.
		for range 1000 {
			limited, result, err := l.RateLimitCtx(ctx, key, 1)
			if err == nil {
				return result.RetryAfter, !limited
			}
		}
		tb.Error("no decision after 1000 times ten attempts")
		return 0, false
	}
}

func goLimiter(tb testing.TB, b budget, _ int) decide[string] {
	store, err := memorystore.New(&memorystore.Config{Tokens: uint64(b.count), Interval: b.window})
	if err != nil {
		tb.Fatal(err)
	}
	ctx := context.Background()
	tb.Cleanup(func() { _ = store.Close(ctx) })
	return func(key string) (time.Duration, bool) {
		_, _, reset, ok, err := store.Take(ctx, key)
		if err != nil {
			tb.Error(err)
		}
		if ok {
			return 0, true
		}
		return time.Until(time.Unix(0, int64(reset))), false
	}
}

func ululeLimiter(tb testing.TB, b budget, _ int) decide[string] {
	l := limiter.New(memory.NewStore(), limiter.Rate{Period: b.window, Limit: int64(b.count)})
	ctx := context.Background()
	return func(key string) (time.Duration, bool) {
		result, err := l.Get(ctx, key)
		if err != nil {
			tb.Error(err)
		}
		if !result.Reached {
			return 0, true
		}
		return time.Until(time.Unix(result.Reset, 0)), false
	}
}

// httprate's limiter writes headers; what it counts with is asked as it does so
// itself, in a window that slides over two counts. It tells no time to wait: the
// rest of the window is one.
func httprateCounter(tb testing.TB, b budget, _ int) decide[string] {
	counter := httprate.NewLocalLimitCounter(b.window)
	var mu sync.Mutex
	return func(key string) (time.Duration, bool) {
		now := time.Now().UTC()
		window := now.Truncate(b.window)
		mu.Lock()
		defer mu.Unlock()
		current, previous, err := counter.Get(key, window, window.Add(-b.window))
		if err != nil {
			tb.Error(err)
		}
		passed := now.Sub(window)
		used := float64(previous)*float64(b.window-passed)/float64(b.window) + float64(current)
		if used+1 > float64(b.count) {
			return b.window - passed, false
		}
		if err := counter.IncrementBy(key, window, 1); err != nil {
			tb.Error(err)
		}
		return 0, true
	}
}
