// Package bench compares edge_limit with other limiters, in this process and, in
// e2e, as servers. It is a module of its own, so that what it compares with never
// becomes a dependency of the product.
package bench

import (
	"flag"
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

var keys16M = flag.Bool("16M", false, "also compare at 16 million keys, which takes some GB and minutes")

// BenchmarkDecision is one decision of each limiter: by how many keys it holds,
// and by how many threads ask at the same time. Each key is known and may pass.
func BenchmarkDecision(b *testing.B) {
	counts := []int{1, 10_000, 1_000_000}
	if *keys16M {
		counts = append(counts, 16_000_000)
	}
	for _, n := range counts {
		for _, maker := range limiterMakers {
			name := fmt.Sprintf("limiter=%s/keys=%d", maker.name, n)
			if maker.byAddress != nil {
				b.Run(name, func(b *testing.B) {
					benchmarkDecision(b, maker.byAddress, endless(n), addresses(n), func(a netip.Addr) netip.Addr { return a })
				})
			} else {
				b.Run(name, func(b *testing.B) {
					benchmarkDecision(b, maker.byString, endless(n), texts(n), strings.Clone)
				})
			}
		}
	}
}

// BenchmarkDenied is the same for keys that have used up their budget.
func BenchmarkDenied(b *testing.B) {
	const n = 10_000
	for _, maker := range limiterMakers {
		b.Run(fmt.Sprintf("limiter=%s/keys=%d", maker.name, n), func(b *testing.B) {
			if maker.byAddress != nil {
				benchmarkDecision(b, maker.byAddress, exhausted, addresses(n), func(a netip.Addr) netip.Addr { return a })
			} else {
				benchmarkDecision(b, maker.byString, exhausted, texts(n), strings.Clone)
			}
		})
	}
}

// stride is the step from one key to the next, so that no cache foresees it.
const stride = 7919

func benchmarkDecision[K any](b *testing.B, make func(testing.TB, budget, int) decide[K], limit budget, keys []K, fromRequest func(K) K) {
	before := heap()
	decide := make(b, limit, len(keys))
	for _, key := range keys {
		decide(fromRequest(key)) // what a limiter keeps of a request's key is its own
	}
	bytesPerKey := float64(heap()-before) / float64(len(keys))
	allowed := limit != exhausted

	for _, threads := range []int{1, 2} {
		b.Run(fmt.Sprintf("threads=%d", threads), func(b *testing.B) {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(threads))
			b.ReportAllocs()
			b.ResetTimer() // without b.Loop, what came before counts
			var started atomic.Int64
			b.RunParallel(func(pb *testing.PB) {
				i := int(started.Add(1)) % len(keys)
				for pb.Next() {
					if wait, ok := decide(keys[i]); ok != allowed || !ok && wait <= 0 {
						b.Errorf("allowed %v, wait %v", ok, wait)
						return
					}
					if i += stride; i >= len(keys) {
						i %= len(keys)
					}
				}
			})
			if len(keys) >= 1000 {
				b.ReportMetric(bytesPerKey, "heap-B/key")
			}
		})
	}
	runtime.KeepAlive(decide)
}

// heap is how much of it is in use.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc)
}

func addresses(n int) []netip.Addr {
	list := make([]netip.Addr, n)
	for i := range list {
		list[i] = netip.AddrFrom4([4]byte{byte(11 + i>>24), byte(i >> 16), byte(i >> 8), byte(i)})
	}
	return list
}

func texts(n int) []string {
	list := make([]string, n)
	for i, a := range addresses(n) {
		list[i] = a.String()
	}
	return list
}

// TestSameWork checks that all limiters answer alike, so that what is compared is
// the same work.
func TestSameWork(t *testing.T) {
	for _, maker := range limiterMakers {
		t.Run(maker.name, func(t *testing.T) {
			decide := maker.byString
			if decide == nil {
				decide = func(tb testing.TB, b budget, keys int) decideText {
					byAddress := maker.byAddress(tb, b, keys)
					return func(key string) (time.Duration, bool) { return byAddress(netip.MustParseAddr(key)) }
				}
			}
			limited := decide(t, exhausted, 2)
			for _, key := range texts(2) {
				if wait, ok := limited(key); !ok || wait > 0 {
					t.Errorf("first request of %s: allowed %v, wait %v", key, ok, wait)
				}
				if wait, ok := limited(key); ok || wait <= 0 || wait > exhausted.window {
					t.Errorf("second request of %s: allowed %v, wait %v", key, ok, wait)
				}
			}
		})
	}
}

type decideText = decide[string]
