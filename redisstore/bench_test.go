package redisstore

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	edgelimit "github.com/edgelimit/caddy-edgelimit"
)

// BenchmarkTake is one request's call, by how many limits it has, with 64 of
// them at the same time.
func BenchmarkTake(b *testing.B) {
	connected, err := (&Store{Address: []string{startRedis(b)}}).dial(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	defer connected.Close()
	for _, limits := range []int{1, 3} {
		b.Run("limits="+strconv.Itoa(limits), func(b *testing.B) {
			b.ReportAllocs()
			b.SetParallelism(64)
			var caller atomic.Int64
			b.RunParallel(func(pb *testing.PB) {
				n := int(caller.Add(1)) * 100
				charges := make([]edgelimit.StoreCharge, limits)
				for pb.Next() {
					n++
					for i := range charges {
						charges[i] = edgelimit.StoreCharge{
							Key: keyNumber(edgelimit.StoreLimit, n%1000*3+i), Increment: time.Microsecond, Tolerance: time.Hour, ID: "a",
						}
					}
					ctx, cancel := context.WithTimeout(context.Background(), time.Second)
					err := connected.Take(ctx, charges)
					cancel()
					if err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
	}
}
