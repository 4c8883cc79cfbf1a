package main

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"

	edgelimit "github.com/edgelimit/caddy-edgelimit"
	"github.com/edgelimit/caddy-edgelimit/bench/internal/process"
	"github.com/edgelimit/caddy-edgelimit/bench/internal/stats"
)

// measureDecisions compares the calls alone, without a server around them: what
// one process gets out of Redis with so many callers at the same time. All pass.
func measureDecisions(s *redisServer, o options) error {
	if o.caddyCPU != process.AnyCPU {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // the other core is Redis's
	}
	conn, err := s.connect()
	if err != nil {
		return err
	}
	defer conn.Close()
	client := redis.NewClient(&redis.Options{Addr: s.address.String(), PoolSize: o.pool})
	defer client.Close()
	limiter := redis_rate.NewLimiter(client)
	limit := redis_rate.Limit{Rate: 1, Period: time.Second, Burst: 1 << 30}
	names := make([]string, o.clients)
	for i := range names {
		names[i] = fmt.Sprintf("198.51.%d.%d", i>>8, i&0xff)
	}

	own := func(ctx context.Context, i int) error {
		charge := []edgelimit.StoreCharge{{Key: key(edgelimit.StoreLimit, i%o.clients), Increment: time.Second, Tolerance: 1_000_000 * time.Hour}}
		if err := conn.Take(ctx, charge); err != nil {
			return fmt.Errorf("charging: %w", err)
		}
		if charge[0].Denied {
			return fmt.Errorf("key %d was denied", i%o.clients)
		}
		return nil
	}
	other := func(ctx context.Context, i int) error {
		result, err := limiter.Allow(ctx, names[i%o.clients], limit)
		if err != nil {
			return fmt.Errorf("charging: %w", err)
		}
		if result.Allowed == 0 {
			return fmt.Errorf("key %d was denied", i%o.clients)
		}
		return nil
	}
	var ratios, owns, others []float64
	for round := range o.rounds {
		perSecond := make(map[bool]float64)
		for _, isOwn := range []bool{round%2 == 0, round%2 != 0} {
			decide := other
			if isOwn {
				decide = own
			}
			if err := s.empty(); err != nil {
				return err
			}
			if _, err := callsASecond(o.connections, o.warmUp, decide); err != nil {
				return err
			}
			if perSecond[isOwn], err = callsASecond(o.connections, o.duration, decide); err != nil {
				return err
			}
		}
		owns, others = append(owns, perSecond[true]), append(others, perSecond[false])
		ratios = append(ratios, perSecond[true]/perSecond[false])
	}
	ratio := stats.SpreadOf(ratios)
	verdict := "pass"
	if ratio.Median < atLeast {
		verdict = "FAIL"
	}
	fmt.Printf("\n## Decisions of one process, %d callers\n\nThe calls alone, without a server around them; all pass.\n\n", o.connections)
	fmt.Println("| | decisions a second, median |\n|---|---|")
	fmt.Printf("| %s | %.0f |\n| %s | %.0f |\n", edgeLimit, stats.SpreadOf(owns).Median, perRequest, stats.SpreadOf(others).Median)
	fmt.Printf("\nRatio (min / median / max): %s, at least %d: %s\n", ratio, atLeast, verdict)
	return nil
}

// callsASecond lets so many callers decide for a time, each one after the other.
func callsASecond(callers int, duration time.Duration, decide func(context.Context, int) error) (float64, error) {
	var next, done atomic.Int64
	var wait sync.WaitGroup
	errs := make([]error, callers)
	begin := time.Now()
	for w := range callers {
		wait.Go(func() {
			for time.Since(begin) < duration && errs[w] == nil {
				ctx, cancel := context.WithTimeout(context.Background(), patience)
				errs[w] = decide(ctx, int(next.Add(1)))
				cancel()
				done.Add(1)
			}
		})
	}
	wait.Wait()
	elapsed := time.Since(begin).Seconds()
	for _, err := range errs {
		if err != nil {
			return 0, err
		}
	}
	return float64(done.Load()) / elapsed, nil
}
