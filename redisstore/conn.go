package redisstore

import (
	"cmp"
	"context"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"

	edgelimit "github.com/edgelimit/caddy-edgelimit"
)

// The scripts run on the server, each as a whole.
var (
	//go:embed clock.lua
	clockLua string
	//go:embed plain.lua
	plainLua string
	//go:embed limits.lua
	limitsLua string
	//go:embed take.lua
	takeLua string
	//go:embed give_back.lua
	giveBackLua string
	//go:embed renew.lua
	renewLua string
	//go:embed lease.lua
	leaseLua string
	//go:embed beat.lua
	beatLua string

	takeScript     = rueidis.NewLuaScript(clockLua + plainLua + limitsLua + takeLua)
	giveBackScript = rueidis.NewLuaScript(clockLua + limitsLua + giveBackLua)
	renewScript    = rueidis.NewLuaScript(clockLua + renewLua)
	leaseScript    = rueidis.NewLuaScript(clockLua + leaseLua)
	beatScript     = rueidis.NewLuaScript(clockLua + beatLua)
)

// conn is a connected server or cluster.
type conn struct {
	client  rueidis.Client
	prefix  string
	cluster bool
	opened  time.Time

	// What to add to our clock to get the server's, in microseconds, or 0 while it
	// is not known: it turns a caller's deadline into one that the server can keep,
	// so that it leaves alone what came too late.
	ahead atomic.Int64
}

func newConn(client rueidis.Client, s *Store) *conn {
	return &conn{client: client, prefix: cmp.Or(s.Prefix, defaultPrefix) + ":", cluster: s.cluster(), opened: time.Now()}
}

// Close implements edgelimit.StoreConn.
func (c *conn) Close() { c.client.Close() }

// key is where a budget lies. The braces keep a cluster from spreading by
// anything but the hash.
func (c *conn) key(key edgelimit.StoreKey) string {
	return c.prefix + string(rune(key.Kind)) + ":{" + hex.EncodeToString(key.Hash[:]) + "}"
}

// clock is monotonic, in microseconds.
func (c *conn) clock() int64 { return time.Since(c.opened).Microseconds() }

// deadline is the context's on the server's clock, or "0" where that is not
// known: the nodes of a cluster have a clock each.
func (c *conn) deadline(ctx context.Context) string {
	ahead := c.ahead.Load()
	until, ok := ctx.Deadline()
	if !ok || ahead == 0 || c.cluster {
		return "0"
	}
	return strconv.FormatInt(c.clock()+time.Until(until).Microseconds()+ahead, 10)
}

// reply is what a script answers: whole numbers.
type reply struct {
	now    int64 // on the server's clock, in microseconds
	result int64
	more   []int64
}

// run runs a script that answers with so many numbers more.
func (c *conn) run(ctx context.Context, script *rueidis.Lua, keys, args []string, more int) (reply, error) {
	sent := c.clock()
	answer, err := script.Exec(ctx, c.client, keys, args).AsIntSlice()
	if err != nil {
		return reply{}, classify(err, c.cluster)
	}
	if len(answer) < 3 || answer[1] >= 0 && len(answer) != 3+more {
		return reply{}, &edgelimit.StoreError{Kind: edgelimit.StoreNotRedis, Err: fmt.Errorf("an answer of %d numbers", len(answer))}
	}
	c.ahead.Store(answer[0] - sent) // at most a journey too much
	if answer[2] > 0 {
		edgelimit.CountGarbage(int(answer[2]))
	}
	if answer[1] < 0 {
		return reply{}, errStale
	}
	return reply{answer[0], answer[1], answer[3:]}, nil
}

var errStale = &edgelimit.StoreError{Kind: edgelimit.StoreStale, Err: errors.New("the call came to the server too late")}

func micros(d time.Duration) string {
	whole := d / time.Microsecond
	if d%time.Microsecond > 0 {
		whole++
	}
	return strconv.FormatInt(int64(whole), 10)
}

// Take implements edgelimit.StoreConn. In a cluster keys lie in different
// places: they are charged one after the other, and given back if a later one
// denies.
func (c *conn) Take(ctx context.Context, charges []edgelimit.StoreCharge) error {
	if !c.cluster {
		_, err := c.take(ctx, charges)
		return err
	}
	for i := range charges {
		denied, err := c.take(ctx, charges[i:i+1])
		if err == nil && !denied {
			continue
		}
		var taken []edgelimit.StoreCharge
		for _, earlier := range charges[:i] {
			if !earlier.Denied && !earlier.Peek {
				taken = append(taken, earlier)
			}
		}
		_ = c.GiveBack(ctx, taken) // what is not given back counts as charged; the denial stands
		return err
	}
	return nil
}

func (c *conn) take(ctx context.Context, charges []edgelimit.StoreCharge) (denied bool, err error) {
	keys := make([]string, len(charges))
	args := make([]string, 1, 1+8*len(charges))
	args[0] = c.deadline(ctx)
	for i := range charges {
		charge := &charges[i]
		keys[i] = c.key(charge.Key)
		args = append(args, string(rune(charge.Key.Kind)), flags(charge), charge.ID,
			micros(charge.Increment), micros(charge.Tolerance), micros(charge.Ban),
			strconv.FormatInt(charge.Max, 10), micros(charge.TTL))
	}
	got, err := c.run(ctx, takeScript, keys, args, 4*len(charges))
	if err != nil {
		return false, err
	}
	for i := range charges {
		charge, answer := &charges[i], got.more[4*i:]
		charge.Denied = answer[0] != 0
		charge.Debt, charge.Wait, charge.BanLeft = duration(answer[1]), duration(answer[2]), duration(answer[3])
		charge.TAT = got.now + answer[1]
	}
	return got.result > 0, nil
}

func flags(charge *edgelimit.StoreCharge) string {
	text := make([]byte, 0, 6)
	for _, flag := range []struct {
		set  bool
		text byte
	}{{charge.Observe, 'o'}, {charge.Extend, 'e'}, {charge.Returns, 'r'}, {charge.Peek, 'p'}, {charge.Look, 'l'}, {charge.Late, 't'}} {
		if flag.set {
			text = append(text, flag.text)
		}
	}
	return string(text)
}

// GiveBack implements edgelimit.StoreConn.
func (c *conn) GiveBack(ctx context.Context, charges []edgelimit.StoreCharge) error {
	return c.together(charges, func(charges []edgelimit.StoreCharge) error { return c.giveBack(ctx, charges) })
}

func (c *conn) giveBack(ctx context.Context, charges []edgelimit.StoreCharge) error {
	keys := make([]string, len(charges))
	args := make([]string, 0, 5*len(charges))
	for i := range charges {
		charge := &charges[i]
		tat := charge.TAT
		if charge.Returns {
			tat = 0 // its place is remembered by id
		}
		keys[i] = c.key(charge.Key)
		args = append(args, string(rune(charge.Key.Kind)), charge.ID, strconv.FormatInt(tat, 10),
			micros(charge.Increment), micros(charge.Tolerance))
	}
	got, err := c.run(ctx, giveBackScript, keys, args, len(charges))
	if err != nil {
		return err
	}
	for i := range charges {
		charges[i].Denied, charges[i].Debt, charges[i].TAT = false, duration(got.more[i]), got.now+got.more[i]
	}
	return nil
}

// Renew implements edgelimit.StoreConn.
func (c *conn) Renew(ctx context.Context, charges []edgelimit.StoreCharge) error {
	return c.together(charges, func(charges []edgelimit.StoreCharge) error {
		keys := make([]string, len(charges))
		args := make([]string, 0, 2*len(charges))
		for i := range charges {
			keys[i] = c.key(charges[i].Key)
			args = append(args, charges[i].ID, micros(charges[i].TTL))
		}
		_, err := c.run(ctx, renewScript, keys, args, 0)
		return err
	})
}

// together makes one call of all charges, or in a cluster, where their keys lie
// in different places, one of each.
func (c *conn) together(charges []edgelimit.StoreCharge, tell func([]edgelimit.StoreCharge) error) error {
	if len(charges) == 0 {
		return nil
	}
	if !c.cluster {
		return tell(charges)
	}
	var errs []error
	for i := range charges {
		errs = append(errs, tell(charges[i:i+1]))
	}
	return errors.Join(errs...)
}

// Forget implements edgelimit.StoreConn.
func (c *conn) Forget(ctx context.Context, key edgelimit.StoreKey) (bool, error) {
	n, err := c.client.Do(ctx, c.client.B().Del().Key(c.key(key)).Build()).AsInt64()
	if err != nil {
		return false, classify(err, c.cluster)
	}
	return n > 0, nil
}

// Lease implements edgelimit.StoreConn.
func (c *conn) Lease(ctx context.Context, request edgelimit.LeaseRequest) (edgelimit.Lease, error) {
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	got, err := c.run(ctx, leaseScript, []string{c.key(request.Key)}, []string{
		c.deadline(ctx), micros(request.Slot), number(request.Slots), number(request.Count),
		number(request.Want), number(request.Spent), number(request.Over), number(request.Unused),
	}, 5)
	if err != nil {
		return edgelimit.Lease{}, err
	}
	return edgelimit.Lease{
		Slot: got.more[0], Granted: got.more[1], Left: duration(got.more[2]), Used: got.more[3], Wait: duration(got.more[4]),
	}, nil
}

// pepperHeld is for how long a pepper is in use after its last instance.
const pepperHeld = time.Minute

// Beat implements edgelimit.StoreConn.
func (c *conn) Beat(ctx context.Context, beat edgelimit.Beat) (edgelimit.Pulse, error) {
	keys := []string{c.prefix + "{fleet}:instances", c.prefix + "{fleet}:pepper"}
	if !c.cluster {
		// A node of a cluster would take the keys of its own slots, and so seem
		// usable now and then. It refuses keys of different slots.
		keys = append(keys, c.prefix+"{alone}")
	}
	got, err := c.run(ctx, beatScript, keys, []string{
		beat.Instance, micros(beat.TTL), beat.Pepper, strconv.FormatInt(pepperHeld.Milliseconds(), 10),
	}, 2)
	if err != nil {
		return edgelimit.Pulse{}, err
	}
	return edgelimit.Pulse{Instances: int(got.more[0]), OtherPepper: got.more[1] != 0}, nil
}

// Check implements edgelimit.StoreConn: what a full server forgets matters.
func (c *conn) Check(ctx context.Context) ([]string, error) {
	info, err := c.client.Do(ctx, c.client.B().Info().Section("memory").Build()).ToString()
	if err != nil {
		return nil, classify(err, c.cluster)
	}
	fields := make(map[string]string)
	for line := range strings.Lines(info) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			fields[name] = value
		}
	}
	if fields["maxmemory"] == "0" || fields["maxmemory"] == "" {
		return nil, nil
	}
	if harm, ok := policyHarms[fields["maxmemory_policy"]]; ok {
		return []string{"the store's maxmemory-policy is " + fields["maxmemory_policy"] + ": " + harm + "; set it to volatile-ttl"}, nil
	}
	return nil, nil
}

// policyHarms says what a policy would do to a limiter when memory is full.
// Under volatile-ttl the keys that owe least go first, as in our own tables.
var policyHarms = func() map[string]string {
	const evicts = "a flood of fresh keys evicts those that are over their limit, and so lifts their limits"
	return map[string]string{
		"allkeys-lru": evicts, "allkeys-lfu": evicts, "allkeys-random": evicts,
		"volatile-lru": evicts, "volatile-lfu": evicts, "volatile-random": evicts,
		"noeviction": "when memory is full nothing can be charged there, and on_failure says what holds",
	}
}()

func duration(micros int64) time.Duration { return time.Duration(micros) * time.Microsecond }

// Interface guards.
var _ edgelimit.StoreConn = (*conn)(nil)
