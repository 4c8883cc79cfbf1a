package redisstore

import (
	"context"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	edgelimit "github.com/edgelimit/caddy-edgelimit"
)

// What stands under our keys was perhaps written by somebody else. It never
// breaks a call, and never owes or bans longer than we could have.
func TestGarbage(t *testing.T) {
	c := connect(t)
	ctx := context.Background()
	yearAhead := strconv.FormatInt(time.Now().Add(365*24*time.Hour).UnixMicro(), 10)
	wellFormed := regexp.MustCompile(`^\d{16} 60000000 \d+( \S+ \d+ \d+)*$`)

	for _, row := range []struct {
		reason string
		write  []string // a command; KEY stands for the key
		passes int      // of 10 requests a minute
		banned bool
	}{
		{"nothing", []string{"DEL", "KEY"}, 10, false},
		{"text", []string{"SET", "KEY", "hello"}, 10, false},
		{"nothing but blanks", []string{"SET", "KEY", "   "}, 10, false},
		{"a number alone, long past", []string{"SET", "KEY", "12"}, 10, false},
		{"a TAT alone, a year ahead: no longer than the budget", []string{"SET", "KEY", yearAhead}, 0, false},
		{"a TAT a year ahead", []string{"SET", "KEY", yearAhead + " 60000000 0"}, 0, false},
		{"the same, measured in years", []string{"SET", "KEY", yearAhead + " 31536000000000 0"}, 0, false},
		{"a ban a year ahead", []string{"SET", "KEY", "1 60000000 " + yearAhead}, 0, true},
		{"no number", []string{"SET", "KEY", "nan nan nan"}, 10, false},
		{"endless", []string{"SET", "KEY", "inf inf inf"}, 10, false},
		{"negative", []string{"SET", "KEY", "-5 -5 -5"}, 10, false},
		{"hexadecimal, which Lua reads", []string{"SET", "KEY", "0x10 0x10 0x10"}, 10, false},
		{"a tolerance of nothing", []string{"SET", "KEY", "1 0 0"}, 10, false},
		{"charges to give back that are none", []string{"SET", "KEY", "1 60000000 0 a b c d e f"}, 10, false},
		{"more than any of ours", []string{"SET", "KEY", strings.Repeat("1 ", 100_000)}, 10, false},
		{"bytes", []string{"SET", "KEY", "\x00\xff\xfe\r\n"}, 10, false},
		{"a list", []string{"RPUSH", "KEY", "1"}, 10, false},
		{"a hash", []string{"HSET", "KEY", "a", "b"}, 10, false},
		{"a sorted set", []string{"ZADD", "KEY", "1", "a"}, 10, false},
		{"a stream", []string{"XADD", "KEY", "*", "a", "b"}, 10, false},
	} {
		t.Run(row.reason, func(t *testing.T) {
			key := keyNumber(edgelimit.StoreLimit, 1)
			c.do(t, "DEL", c.key(key))
			for i := range row.write {
				row.write[i] = strings.ReplaceAll(row.write[i], "KEY", c.key(key))
			}
			c.do(t, row.write...)
			passed := 0
			for range 30 {
				charges := []edgelimit.StoreCharge{{
					Key: key, Increment: 6 * time.Second, Tolerance: time.Minute, Ban: time.Hour, ID: "a", Returns: true,
				}}
				if err := c.Take(ctx, charges); err != nil {
					t.Fatal(err)
				}
				got := charges[0]
				if !got.Denied {
					passed++
				}
				if got.Debt > time.Minute || got.Wait > time.Hour || got.BanLeft > time.Hour {
					t.Fatalf("debt %s, wait %s, ban %s are longer than ours can be", got.Debt, got.Wait, got.BanLeft)
				}
			}
			if passed != row.passes {
				t.Errorf("%d of 30 pass, want %d", passed, row.passes)
			}
			if value := c.get(t, "GET", c.key(key)); !wellFormed.MatchString(value) {
				t.Errorf("what stands there now: %.100q", value)
			}
		})
	}
}

// The same for what is in flight, ceilings and instances.
func TestGarbageElsewhere(t *testing.T) {
	c := connect(t)
	ctx := context.Background()
	inFlight, ceiling := keyNumber(edgelimit.StoreInFlight, 2), keyNumber(edgelimit.StoreCeiling, 3)
	yearAhead := strconv.FormatInt(time.Now().Add(365*24*time.Hour).UnixMicro(), 10)
	const instances, pepper = "edge_limit:{fleet}:instances", "edge_limit:{fleet}:pepper"
	for _, write := range [][]string{
		{"SET", "KEY", "hello"}, {"RPUSH", "KEY", "1"}, {"HSET", "KEY", "a", "b"}, {"HSET", "KEY", "width", "x", "1e300", "-7", "7", "nan"},
		{"HSET", "KEY", "width", "100000", "99999999999999", "-5"}, {"SADD", "KEY", "a"}, {"ZADD", "KEY", "-inf", "a"}, {"ZADD", "KEY", "1", "a"},
	} {
		for _, key := range []string{c.key(inFlight), c.key(ceiling), instances, pepper} {
			c.do(t, "DEL", key)
			args := append([]string{write[0], key}, write[2:]...)
			c.do(t, args...)
		}
		charges := []edgelimit.StoreCharge{{Key: inFlight, Max: 1, TTL: time.Minute, ID: "a"}}
		if err := c.Take(ctx, charges); err != nil || charges[0].Denied {
			t.Errorf("%q: in flight: denied %t, %v", write, charges[0].Denied, err)
		}
		if err := c.Renew(ctx, charges); err != nil {
			t.Errorf("%q: renew: %v", write, err)
		}
		if err := c.GiveBack(ctx, charges); err != nil {
			t.Errorf("%q: give back: %v", write, err)
		}
		lease, err := c.Lease(ctx, edgelimit.LeaseRequest{Key: ceiling, Count: 5, Slot: 100 * time.Millisecond, Slots: 10, Want: 2})
		if err != nil || lease.Granted != 2 {
			t.Errorf("%q: lease: %d granted, %v", write, lease.Granted, err)
		}
		pulse, err := c.Beat(ctx, edgelimit.Beat{Instance: "me", TTL: 5 * time.Second, Pepper: "0123456789abcdef"})
		if err != nil || pulse.Instances != 1 || pulse.OtherPepper {
			t.Errorf("%q: beat: %+v, %v", write, pulse, err)
		}
	}

	c.do(t, "DEL", c.key(inFlight), instances)
	c.do(t, "ZADD", c.key(inFlight), yearAhead, "a", yearAhead, "b")
	c.do(t, "ZADD", instances, yearAhead, "ghost")
	charges := []edgelimit.StoreCharge{{Key: inFlight, Max: 2, TTL: 50 * time.Millisecond, ID: "c"}}
	if err := c.Take(ctx, charges); err != nil || !charges[0].Denied {
		t.Errorf("two that seem to run: denied %t, %v", charges[0].Denied, err)
	}
	for deadline := time.Now().Add(10 * time.Second); charges[0].Denied; {
		if time.Now().After(deadline) {
			t.Fatal("what was to run for a year still does, after more than its time")
		}
		if err := c.Take(ctx, charges); err != nil {
			t.Fatal(err)
		}
	}
	if pulse, err := c.Beat(ctx, edgelimit.Beat{Instance: "me", TTL: 5 * time.Second, Pepper: "0123456789abcdef"}); err != nil || pulse.Instances != 1 {
		t.Errorf("an instance that is to be there for a year: %+v, %v", pulse, err)
	}
	// a ceiling's slots that somebody filled, of now and of the future, count as
	// used up for one window and no longer
	c.do(t, "DEL", c.key(ceiling))
	c.do(t, "HSET", c.key(ceiling), "width", "10000", yearAhead, "100000000")
	request := edgelimit.LeaseRequest{Key: ceiling, Count: 5, Slot: 10 * time.Millisecond, Slots: 10, Want: 2}
	granted := int64(0)
	for deadline := time.Now().Add(10 * time.Second); granted == 0; {
		if time.Now().After(deadline) {
			t.Fatal("the ceiling stays used up for longer than a window")
		}
		lease, err := c.Lease(ctx, request)
		if err != nil {
			t.Fatal(err)
		}
		granted = lease.Granted
	}
}

// A pepper stays in use for as long as its instances are, and a minute.
func TestPepperInUse(t *testing.T) {
	c := connect(t)
	ctx := context.Background()
	beat := func(instance, pepper string, ttl time.Duration) edgelimit.Pulse {
		t.Helper()
		pulse, err := c.Beat(ctx, edgelimit.Beat{Instance: instance, TTL: ttl, Pepper: pepper})
		if err != nil {
			t.Fatal(err)
		}
		return pulse
	}
	const long = 5 * time.Second
	const one, two = "0123456789abcdef", "fedcba9876543210"
	for _, row := range []struct {
		reason           string
		instance, pepper string
		ttl              time.Duration
		want             edgelimit.Pulse
	}{
		{"the first", "a", one, long, edgelimit.Pulse{Instances: 1}},
		{"a second", "b", one, long, edgelimit.Pulse{Instances: 2}},
		{"another pepper", "c", two, long, edgelimit.Pulse{OtherPepper: true}},
		{"which is not counted", "a", one, long, edgelimit.Pulse{Instances: 2}},
		{"one goes", "b", one, 0, edgelimit.Pulse{Instances: 1}},
		{"the pepper stays while the other is there", "c", two, long, edgelimit.Pulse{OtherPepper: true}},
	} {
		if got := beat(row.instance, row.pepper, row.ttl); got != row.want {
			t.Errorf("%s: %+v, want %+v", row.reason, got, row.want)
		}
	}
	if left, _ := strconv.Atoi(c.get(t, "PTTL", "edge_limit:{fleet}:pepper")); left < 50_000 || left > 60_000 {
		t.Errorf("the pepper is held for %d ms", left)
	}
	c.do(t, "DEL", "edge_limit:{fleet}:pepper") // the minute is over
	if got := beat("c", two, long); got.OtherPepper {
		t.Error("the pepper is still refused")
	}
	c.do(t, "PERSIST", "edge_limit:{fleet}:pepper") // as if another program had written it
	if got := beat("a", one, long); !got.OtherPepper {
		t.Error("another pepper is not refused")
	}
	if left, _ := strconv.Atoi(c.get(t, "PTTL", "edge_limit:{fleet}:pepper")); left < 50_000 {
		t.Errorf("a pepper without an end is held for %d ms", left)
	}
}

// A call that comes too late has no effect, and the server's clock may be set.
func TestLateCalls(t *testing.T) {
	c := connect(t)
	charge := func() []edgelimit.StoreCharge {
		return []edgelimit.StoreCharge{{Key: keyNumber(edgelimit.StoreLimit, 4), Increment: time.Second, Tolerance: time.Minute, ID: "a"}}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := c.Take(ctx, charge()); err != nil {
		t.Fatalf("before anything is known of the server's clock: %v", err)
	}
	c.ahead.Add(-int64(time.Hour / time.Microsecond)) // as if its clock had been set an hour ahead since
	if err := c.Take(ctx, charge()); err != errStale {
		t.Errorf("a call that came too late: %v", err)
	}
	charges := charge()
	if err := c.Take(ctx, charges); err != nil {
		t.Errorf("the next one, for which its clock is known: %v", err)
	}
	if debt := charges[0].Debt; debt > 2*time.Second {
		t.Errorf("the late call was charged: the debt is %s after two", debt)
	}
}
