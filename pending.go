package edgelimit

import (
	"slices"
	"sync"
	"time"
)

// A limit with on_status charges a request when it comes in and may give that
// back when its answer is known. What has decayed meanwhile must not be given
// back: it is gone already, and a second time would be a budget for free.
//
// A TAT is the end of a queue that time works off, and each charge has its place
// in it. Giving back one charge moves those behind it forward, so that they
// decay sooner than they would have. So the places of all charges that still can
// be given back are kept, by key, as long as their requests are in flight.

// pendingCharge is a charge whose answer is not known yet.
type pendingCharge struct {
	id        int64
	own       int64 // the key's TAT with this charge, as if what was given back had never been
	increment int64
	measure   gcra  // the numbers that these two are measured in
	since     int64 // when these came into force
}

// follow follows the debts into the numbers of a later ledger. Who is still about
// to look into the ledger before finds nothing of his own there, and must not take
// what others were charged along.
func (c *pendingCharge) follow(g gcra, since int64) {
	if c.measure != g && since >= c.since {
		c.own = g.rescaled(c.own, c.measure, since)
		c.increment = g.rescaled(since+c.increment, c.measure, since) - since
		c.measure, c.since = g, since
	}
}

// pendingCharges are those of one limit. The zero value is empty. It is safe for
// concurrent use.
type pendingCharges struct {
	shards [pendingShards]struct {
		mu     sync.Mutex
		nextID int64
		byKey  map[uint64][]pendingCharge
	}
}

const pendingShards = 16 // keys are hashes: their upper bits choose

// take charges one request to key. id is what end wants. g is the arithmetic of
// debts, but may allow a request of more than the burst.
func (p *pendingCharges) take(g gcra, debts *ledger, key uint64, increment, now int64) (id int64, wait time.Duration, ok bool) {
	shard := &p.shards[key>>60]
	shard.mu.Lock()
	defer shard.mu.Unlock()
	own, wait, ok := g.take(debts.Table, key, increment, now)
	if !ok {
		return 0, wait, false
	}
	if shard.byKey == nil {
		shard.byKey = make(map[uint64][]pendingCharge)
	}
	shard.nextID++
	shard.byKey[key] = append(shard.byKey[key], pendingCharge{shard.nextID, own, increment, debts.gcra, debts.since})
	return shard.nextID, 0, true
}

// end is called once for each charge: it is kept, or given back as far as it has
// not decayed.
func (p *pendingCharges) end(debts *ledger, key uint64, id int64, giveBack bool, now int64) {
	shard := &p.shards[key>>60]
	shard.mu.Lock()
	defer shard.mu.Unlock()
	charges := shard.byKey[key]
	for i := range charges {
		charges[i].follow(debts.gcra, debts.since) // made by who still held the ledger before
	}
	n := slices.IndexFunc(charges, func(c pendingCharge) bool { return c.id == id })
	if n < 0 {
		return
	}
	charge := charges[n]
	if charges = slices.Delete(charges, n, n+1); len(charges) == 0 {
		delete(shard.byKey, key)
	} else {
		shard.byKey[key] = charges
	}
	if !giveBack {
		return
	}
	debts.giveBack(debts.Table, key, charge.increment, charge.own, now)
	returned := max(0, min(charge.increment, charge.own-now))
	for i := range charges {
		if charges[i].own > charge.own {
			charges[i].own -= returned
		}
	}
}

// follow follows the debts into other numbers.
func (p *pendingCharges) follow(g gcra, now int64) {
	for i := range p.shards {
		shard := &p.shards[i]
		shard.mu.Lock()
		for _, charges := range shard.byKey {
			for n := range charges {
				charges[n].follow(g, now)
			}
		}
		shard.mu.Unlock()
	}
}
