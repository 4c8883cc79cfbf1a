// Package table holds the debts of a rate limit in bounded memory.
//
// It is a hash table from the hash of a key to the key's TAT, the theoretical
// arrival time of GCRA: the one timestamp that says everything about how much
// of a budget is used. How far a TAT lies in the future is the key's debt. A
// key whose TAT has passed owes nothing, and forgetting it changes no decision.
//
// # Structure
//
// A table is split into shards of about 2048 slots, each with its own mutex. A
// shard is a flat array of sets, and a set has 8 slots of 16 bytes without
// pointers: two cache lines, and nothing for the garbage collector to look at.
// A shard starts with one set and doubles when a newcomer finds no room, until
// it has reached its share of the bound.
//
// Each key has two sets, chosen by different bits of its hash, in which it may
// lie, and goes to the one with fewer debts. One set for each key would do for
// look-ups, but then some sets fill up when the table is hardly more than half
// full, and a debt is displaced while there is room elsewhere. Two choices
// even the sets out. When both are full, one of their 16 entries may move to
// its own other set. Looking that one step ahead is enough to fill a table to
// 95 % with fewer than one debt in a thousand displaced, and the cost of an
// insertion stays bounded, which longer chains of moves would not promise.
//
// # When it is full
//
// The bound is exact, because there are no more than maxKeys slots in which a
// key could be. A newcomer is always stored, so that it cannot pass unlimited.
// It takes the place of an entry without debt, which loses nothing, else of the
// smallest debt among the 16, which loses least. With a burst of two or more, a
// key that has used up its budget owes more than a fresh one; a flood of fresh
// keys therefore displaces only itself. With a burst of one the two owe the
// same, and the oldest goes first. What was forgotten is counted.
//
// # Keys and times
//
// A key is a 64-bit hash. Its bits must be evenly distributed, and should
// depend on a secret, else somebody can aim at one set. Two keys with the same
// hash share one budget. The hash 0 counts as 1.
//
// Times are nanoseconds of one monotonic clock of the caller's, above 0, and
// durations are nanoseconds too. The package reads no clock.
package table

import (
	"iter"
	"math/bits"
)

// shardSlots is how many slots a shard has at full size, at most. Small enough
// that growing one shard holds up its keys for well under a millisecond, large
// enough that the shards fill up evenly.
const shardSlots = 2048

// Table is a bounded table of TATs. Make it with [New]: the zero value is not
// usable. It must not be copied. All methods may be called at the same time;
// those that take a key are atomic for that key.
type Table struct {
	shards  []shard
	maxKeys int
}

// New returns an empty table that will never hold more than maxKeys keys (at
// least 1). It starts small; at full size it takes 16 to 20 bytes for each of
// maxKeys, from a thousand on.
func New(maxKeys int) *Table {
	maxKeys = max(maxKeys, 1)
	return &Table{newShards(maxKeys), maxKeys}
}

// Peek returns the key's TAT, which may have passed, or 0 when the key is
// unknown. It changes nothing.
func (t *Table) Peek(key uint64, now int64) int64 {
	key = storable(key)
	s := t.lock(key)
	var tat int64
	if e := s.find(key); e != nil {
		tat = e.tat
	}
	s.mu.Unlock()
	return tat
}

// Add charges one request to the key: it moves the TAT, or now when that is
// later, by increment (the emission interval times the request's cost), if the
// result lies no further ahead of now than tolerance (the emission interval
// times the burst). It returns the new TAT and true. Otherwise nothing is
// changed or inserted, and it returns the TAT as [Table.Peek] does, and false.
//
// Neither increment nor tolerance may be negative. Nothing overflows while
// each of the two is at most 100 years, and so is now.
func (t *Table) Add(key uint64, now, increment, tolerance int64) (tat int64, ok bool) {
	key = storable(key)
	s := t.lock(key)
	e := s.find(key)
	if e != nil {
		tat = e.tat
	}
	start := max(tat, now)
	// The same as start+increment-now > tolerance, but cannot overflow.
	if increment > tolerance-(start-now) {
		s.mu.Unlock()
		return tat, false
	}
	tat = start + increment
	if e != nil {
		e.tat = tat
	} else if tat > now {
		s.insert(entry{key, tat}, now)
	}
	s.mu.Unlock()
	return tat, true
}

// Set gives the key this TAT, whatever it had, and returns that as [Table.Peek]
// does: to restore a debt, or for a ban. A key that is unknown and would owe
// nothing is not inserted. A newcomer displaces what it must, as with [Table.Add],
// even a larger debt than its own: restore more debts than there is room for in
// ascending order.
func (t *Table) Set(key uint64, now, tat int64) (before int64) {
	key = storable(key)
	s := t.lock(key)
	if e := s.find(key); e != nil {
		before, e.tat = e.tat, tat
	} else if tat > now {
		s.insert(entry{key, tat}, now)
	}
	s.mu.Unlock()
	return before
}

// Refund takes amount, which must not be negative, off the key's debt, but no
// more than it owes. A key that was forgotten gets nothing.
func (t *Table) Refund(key uint64, now, amount int64) {
	key = storable(key)
	s := t.lock(key)
	if e := s.find(key); e != nil && e.tat > now {
		e.tat -= min(amount, e.tat-now)
	}
	s.mu.Unlock()
}

// Delete forgets the key, and returns the TAT that it had, and whether it was
// known. It does not count as forgotten.
func (t *Table) Delete(key uint64) (tat int64, known bool) {
	key = storable(key)
	s := t.lock(key)
	e := s.find(key)
	if e != nil {
		tat = e.tat
		*e = entry{}
		s.used--
	}
	s.mu.Unlock()
	return tat, e != nil
}

// Move gives the key a TAT that it had in another table, unless it has a later
// one. It displaces no larger debt than its own: where there are only such, it
// counts as forgotten.
func (t *Table) Move(key uint64, now, tat int64) {
	key = storable(key)
	s := t.lock(key)
	if e := s.find(key); e != nil {
		e.tat = max(e.tat, tat)
	} else if tat > now {
		s.keep(entry{key, tat}, now)
	}
	s.mu.Unlock()
}

// Len returns how many keys are held, with and without debt. It is never above
// the bound.
func (t *Table) Len() int {
	var n int
	for s := range t.locked() {
		n += s.used
	}
	return n
}

// MaxKeys returns the bound.
func (t *Table) MaxKeys() int { return t.maxKeys }

// Forgotten returns how many keys the table has let go since it was made: of
// those that owed nothing, which changed no decision, and of those that did.
func (t *Table) Forgotten() (debtFree, indebted uint64) {
	for s := range t.locked() {
		debtFree += s.debtFree
		indebted += s.indebted
	}
	return debtFree, indebted
}

// All iterates over all keys and their TATs, in no particular order. Each
// shard is copied when it is reached: the loop may take its time and use the
// table, and sees a state that no single moment may have had.
func (t *Table) All() iter.Seq2[uint64, int64] {
	return func(yield func(uint64, int64) bool) {
		var entries []entry
		for i := range t.shards {
			entries = t.shards[i].appendEntries(entries[:0])
			for _, e := range entries {
				if !yield(e.key, e.tat) {
					return
				}
			}
		}
	}
}

// lock returns the key's shard, locked.
func (t *Table) lock(key uint64) *shard {
	s := &t.shards[reduce(key, len(t.shards))]
	s.mu.Lock()
	return s
}

// locked iterates over the shards, each locked while it is the loop's.
func (t *Table) locked() iter.Seq[*shard] {
	return func(yield func(*shard) bool) {
		for i := range t.shards {
			s := &t.shards[i]
			s.mu.Lock()
			more := yield(s)
			s.mu.Unlock()
			if !more {
				return
			}
		}
	}
}

// newShards returns as many shards as suit the bound, with their shares of it.
func newShards(maxKeys int) []shard {
	shards := make([]shard, (maxKeys-1)/shardSlots+1)
	for i := range shards {
		s := &shards[i]
		s.maxSlots = share(maxKeys, len(shards), i)
		s.sets = s.newSets(1)
	}
	return shards
}

// share returns how many of the slots the i-th of n shards gets.
func share(slots, n, i int) int {
	if i < slots%n {
		return slots/n + 1
	}
	return slots / n
}

// storable returns the key as it is stored: 0 marks an empty slot.
func storable(key uint64) uint64 {
	if key == 0 {
		return 1
	}
	return key
}

// reduce maps a hash to 0..n-1 by its upper bits, without a division.
func reduce(hash uint64, n int) int {
	i, _ := bits.Mul64(hash, uint64(n))
	return int(i)
}
