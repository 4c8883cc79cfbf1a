package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	edgelimit "github.com/edgelimit/caddy-edgelimit"
	"github.com/edgelimit/caddy-edgelimit/redisstore"
)

// connect connects to Redis as edge_limit does.
func (s *redisServer) connect() (edgelimit.StoreConn, error) {
	store := &redisstore.Store{Address: []string{s.address.String()}}
	conn, err := store.Shared().Dial(context.Background())
	if err != nil {
		return nil, fmt.Errorf("connecting to Redis: %w", err)
	}
	return conn, nil
}

const (
	parallel = 64               // calls under way at the same time
	patience = 10 * time.Second // for one
)

// inParallel does something with each of n numbers.
func inParallel(n, workers int, do func(context.Context, int) error) error {
	var next atomic.Int64
	var wait sync.WaitGroup
	errs := make([]error, workers)
	for w := range workers {
		wait.Go(func() {
			for i := int(next.Add(1)) - 1; i < n && errs[w] == nil; i = int(next.Add(1)) - 1 {
				ctx, cancel := context.WithTimeout(context.Background(), patience)
				errs[w] = do(ctx, i)
				cancel()
			}
		})
	}
	wait.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// key is one of many, spread as hashes are.
func key(kind edgelimit.StoreKind, n int) (key edgelimit.StoreKey) {
	key.Kind = kind
	binary.BigEndian.PutUint64(key.Hash[:], uint64(n)*0x9e3779b97f4a7c15)
	binary.BigEndian.PutUint64(key.Hash[8:], uint64(n)*0xc2b2ae3d27d4eb4f)
	return key
}

// id is as long as those of a process that has answered some million requests.
func id(n int) string { return "0123456789abcdef" + strconv.FormatInt(int64(10_000_000+n), 36) }

// aLimit is 1000/h: what counts for its size is that a charge lasts.
func aLimit(n int) edgelimit.StoreCharge {
	return edgelimit.StoreCharge{Key: key(edgelimit.StoreLimit, n), Increment: 3600 * time.Millisecond, Tolerance: time.Hour, ID: id(n)}
}

// measureSizes says what budgets take in Redis.
func measureSizes(s *redisServer, keys int) error {
	conn, err := s.connect()
	if err != nil {
		return err
	}
	defer conn.Close()
	take := func(charge func(int) edgelimit.StoreCharge, times int) func() error {
		return func() error {
			return inParallel(keys*times, parallel, func(ctx context.Context, i int) error {
				c := charge(i % keys)
				c.ID = id(i)
				return conn.Take(ctx, []edgelimit.StoreCharge{c})
			})
		}
	}
	pending := func(n int) edgelimit.StoreCharge {
		c := aLimit(n)
		c.Returns = true
		return c
	}
	inFlight := func(n int) edgelimit.StoreCharge {
		return edgelimit.StoreCharge{Key: key(edgelimit.StoreInFlight, n), Max: 100, TTL: time.Hour}
	}
	fmt.Println("\n## Size of a key in Redis")
	fmt.Println("\nMEMORY USAGE is of the key's name, its value and their places; used_memory also has the tables that find keys and their ends.")
	fmt.Println("\n| budget | keys | MEMORY USAGE, median | max | used_memory a key |\n|---|---|---|---|---|")
	for _, row := range []struct {
		name string
		keys int
		fill func() error
	}{
		{"a limit", keys, take(aLimit, 1)},
		{"a limit with on_status, 1 answer awaited", keys, take(pending, 1)},
		{"a limit with on_status, 10 answers awaited", keys, take(pending, 10)},
		{"an in_flight, 1 request", keys, take(inFlight, 1)},
		{"an in_flight, 10 requests", keys, take(inFlight, 10)},
		{"a ceiling, 1 slot used", fewCeilings, func() error { return lease(conn, time.Hour, 1) }},
		{"a ceiling, all slots used", fewCeilings, func() error { return lease(conn, shortSlot, ceilingSlots+1) }},
	} {
		if err := s.empty(); err != nil {
			return err
		}
		before, err := s.memory()
		if err != nil {
			return err
		}
		if err := row.fill(); err != nil {
			return fmt.Errorf("%s: %w", row.name, err)
		}
		after, err := s.memory()
		if err != nil {
			return err
		}
		sizes, err := s.sizes()
		if err != nil {
			return err
		}
		if len(sizes) != row.keys {
			return fmt.Errorf("%s: %d keys instead of %d", row.name, len(sizes), row.keys)
		}
		slices.Sort(sizes)
		all := "too few to tell"
		if row.keys >= 1000 { // connections take some too
			all = fmt.Sprintf("%.0f B", float64(after-before)/float64(row.keys))
		}
		fmt.Printf("| %s | %d | %d B | %d B | %s |\n", row.name, len(sizes), sizes[len(sizes)/2], sizes[len(sizes)-1], all)
	}
	return nil
}

const (
	fewCeilings  = 100 // there is one key a ceiling, and so there are never many
	ceilingSlots = 64
	shortSlot    = 50 * time.Millisecond
)

// lease uses so many slots of some ceilings, one after the other.
func lease(conn edgelimit.StoreConn, slot time.Duration, slots int) error {
	for until := time.Now().Add(time.Duration(slots) * slot); slots > 0; slots-- {
		err := inParallel(fewCeilings, parallel, func(ctx context.Context, i int) error {
			_, err := conn.Lease(ctx, edgelimit.LeaseRequest{Key: key(edgelimit.StoreCeiling, i), Count: 1_000_000, Slot: slot, Slots: ceilingSlots, Want: 1000})
			return err
		})
		if err != nil {
			return err
		}
		if slots > 1 {
			time.Sleep(time.Until(until.Add(-time.Duration(slots-1) * slot)))
		}
	}
	return nil
}

// sizes are those of all keys, as Redis tells them.
func (s *redisServer) sizes() (sizes []int64, err error) {
	ctx := context.Background()
	all := s.client.Scan(ctx, 0, "*", 1000).Iterator()
	for all.Next(ctx) {
		size, err := s.client.MemoryUsage(ctx, all.Val()).Result()
		if err != nil {
			return nil, fmt.Errorf("asking for a key's size: %w", err)
		}
		sizes = append(sizes, size)
	}
	return sizes, all.Err()
}

// measureScripts says what charging a request costs Redis: in calls that come close
// together, and one after the other.
func measureScripts(s *redisServer, calls, workers, clients int) error {
	conn, err := s.connect()
	if err != nil {
		return err
	}
	defer conn.Close()
	// budgets that all calls fit in, and debts that last
	wide := func(limits int) func(int) []edgelimit.StoreCharge {
		return func(i int) (charges []edgelimit.StoreCharge) {
			for l := range limits {
				charges = append(charges, edgelimit.StoreCharge{Key: key(edgelimit.StoreLimit, limits*(i%clients)+l),
					Increment: time.Second, Tolerance: 10_000 * time.Hour, ID: id(i)})
			}
			return charges
		}
	}
	used := func(i int) []edgelimit.StoreCharge { // by the first request of each client
		c := aLimit(i % clients)
		c.Increment, c.Tolerance = time.Hour, time.Hour
		return []edgelimit.StoreCharge{c}
	}
	fmt.Println("\n## What a request costs Redis")
	fmt.Printf("\n%d requests over one connection, of %d clients.\n", calls, clients)
	fmt.Println("\n| request | at the same time | in the script | CPU of the whole process |\n|---|---|---|---|")
	for _, row := range []struct {
		name    string
		charges func(int) []edgelimit.StoreCharge
		denied  bool
		workers int
	}{
		{"1 limit, allowed", wide(1), false, workers},
		{"1 limit, allowed", wide(1), false, 1},
		{"3 limits, allowed", wide(3), false, workers},
		{"3 limits, allowed", wide(3), false, 1},
		{"1 limit, denied", used, true, workers},
		{"1 limit, denied", used, true, 1},
	} {
		if err := s.empty(); err != nil {
			return err
		}
		do := func(expect bool) func(context.Context, int) error {
			return func(ctx context.Context, i int) error {
				charges := row.charges(i)
				if err := conn.Take(ctx, charges); err != nil {
					return err
				}
				if expect && charges[len(charges)-1].Denied != row.denied {
					return fmt.Errorf("denied is %t", !row.denied)
				}
				return nil
			}
		}
		if err := inParallel(clients, workers, do(false)); err != nil {
			return fmt.Errorf("%s: %w", row.name, err)
		}
		before, err := s.usage()
		if err != nil {
			return err
		}
		if err := inParallel(calls, row.workers, do(true)); err != nil {
			return fmt.Errorf("%s: %w", row.name, err)
		}
		after, err := s.usage()
		if err != nil {
			return err
		}
		used := after.since(before)
		if used.calls < calls {
			return fmt.Errorf("%s: %d calls instead of %d", row.name, used.calls, calls)
		}
		n := float64(used.calls)
		fmt.Printf("| %s | %d | %.1f us | %.1f us |\n", row.name, row.workers, micros(used.script)/n, micros(used.cpu)/n)
	}
	return nil
}
