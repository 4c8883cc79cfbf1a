package table

import (
	"math"
	"sync"
)

// entry is one slot. An empty one has key 0 and TAT 0, so that it owes nothing,
// like one whose TAT has passed: either can be written to without loss.
type entry struct {
	key uint64
	tat int64
}

const ways = 8

// set is two cache lines of slots: a key has two sets in which it may lie.
type set [ways]entry

// shard is a part of a table under one lock, which guards all of its fields.
type shard struct {
	mu       sync.Mutex
	sets     []set
	used     int // slots with a key
	maxSlots int // what used may be at full size
	inARow   int // debts displaced since a newcomer last found room

	// Keys forgotten, without debt and with.
	debtFree, indebted uint64

	// Two shards' mutexes are two cache lines apart: processors fetch lines in
	// pairs.
	_ [56]byte
}

// fullAfter is how many debts are displaced in a row before a shard counts as
// full. To look for an entry to relocate is to read 16 other sets, in vain while
// a flood keeps all slots indebted: it is left out until a newcomer finds room.
const fullAfter = 8

// find returns the key's entry, or nil.
func (s *shard) find(key uint64) *entry {
	first, second := s.candidates(key)
	if e := first.find(key); e != nil {
		return e
	}
	return second.find(key)
}

// insert stores a key that find has not found, forgetting another where it must.
func (s *shard) insert(e entry, now int64) {
	if !s.admit(e, now) {
		s.displace(e)
	}
}

// keep stores a debt that is being moved, unless all that it could displace are
// larger.
func (s *shard) keep(e entry, now int64) {
	if s.admit(e, now) {
		return
	}
	first, second := s.candidates(e.key)
	if min(first.smallest().tat, second.smallest().tat) < e.tat {
		s.displace(e)
	} else {
		s.indebted++
	}
}

// admit stores e if that costs no live debt, and reports whether it has.
func (s *shard) admit(e entry, now int64) bool {
	for {
		first, second := s.candidates(e.key)
		slot, live := first.vacancy(now)
		if other, otherLive := second.vacancy(now); otherLive < live {
			slot = other
		}
		if slot != nil {
			s.occupy(slot, e)
			s.inARow = 0
			return true
		}
		if len(s.sets) == s.maxSets() {
			return s.relocate(first, second, e, now)
		}
		s.rehash(min(2*len(s.sets), s.maxSets()), now)
	}
}

// relocate makes room for e in one of its sets: an entry there moves to its own
// other set, if there is room in that. It reports whether one could.
func (s *shard) relocate(first, second *set, e entry, now int64) bool {
	if s.inARow >= fullAfter {
		return false
	}
	for _, from := range [...]*set{first, second} {
		for i := range from {
			moving := &from[i]
			if moving.key == 0 {
				continue // a blocked slot stays
			}
			to, other := s.candidates(moving.key)
			if to == from {
				to = other
			}
			if slot, _ := to.vacancy(now); slot != nil {
				s.occupy(slot, *moving)
				*moving = e
				s.inARow = 0
				return true
			}
		}
	}
	return false
}

// displace stores e in the place of the smallest debt in its sets.
func (s *shard) displace(e entry) {
	first, second := s.candidates(e.key)
	smallest := first.smallest()
	if other := second.smallest(); other.tat < smallest.tat {
		smallest = other
	}
	*smallest = e
	s.inARow++
	s.indebted++
}

// occupy stores e in a slot without debt.
func (s *shard) occupy(slot *entry, e entry) {
	if slot.key == 0 {
		s.used++
	} else {
		s.debtFree++
	}
	*slot = e
}

// rehash moves the debts into n sets, which are more than before. None is lost
// while there is room: where one finds none, admit grows further.
func (s *shard) rehash(n int, now int64) {
	debts := s.appendDebts(make([]entry, 0, s.used), now)
	s.sets, s.used = s.newSets(n), 0
	for _, e := range debts {
		s.keep(e, now)
	}
}

// newSets returns n empty sets. At full size the last one may reach beyond
// maxSlots: those slots are blocked by an endless debt of no key.
func (s *shard) newSets(n int) []set {
	sets := make([]set, n)
	for i := s.maxSlots; i < n*ways; i++ {
		sets[i/ways][i%ways].tat = math.MaxInt64
	}
	return sets
}

func (s *shard) maxSets() int { return (s.maxSlots + ways - 1) / ways }

// appendDebts appends the entries that carry a debt; the others count as
// forgotten.
func (s *shard) appendDebts(debts []entry, now int64) []entry {
	for i := range s.sets {
		for _, e := range s.sets[i] {
			switch {
			case e.key == 0:
			case e.tat > now:
				debts = append(debts, e)
			default:
				s.debtFree++
			}
		}
	}
	return debts
}

// appendEntries appends all entries. It takes the lock itself.
func (s *shard) appendEntries(entries []entry) []entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.sets {
		for _, e := range s.sets[i] {
			if e.key != 0 {
				entries = append(entries, e)
			}
		}
	}
	return entries
}

// candidates returns the key's two sets, which may be one and the same. They
// come from bits 32 to 47 of the hash, and from bits 0 to 31; the upper ones
// have already chosen the shard and are alike in all of its keys.
func (s *shard) candidates(key uint64) (first, second *set) {
	n := len(s.sets)
	return &s.sets[reduce(key<<16, n)], &s.sets[reduce(key<<32, n)]
}

func (s *set) find(key uint64) *entry {
	for i := range s {
		if s[i].key == key {
			return &s[i]
		}
	}
	return nil
}

// vacancy returns a slot without debt, or nil, and how many debts the set has.
func (s *set) vacancy(now int64) (slot *entry, live int) {
	for i := range s {
		if s[i].tat > now {
			live++
		} else if slot == nil {
			slot = &s[i]
		}
	}
	return slot, live
}

// smallest returns the entry with the smallest debt. It is never a blocked slot:
// those come last, and no debt is larger.
func (s *set) smallest() *entry {
	smallest := &s[0]
	for i := range s {
		if s[i].tat < smallest.tat {
			smallest = &s[i]
		}
	}
	return smallest
}
