package edgelimit

import (
	"iter"
	"math"
	"sync"
	"sync/atomic"

	"github.com/edgelimit/caddy-edgelimit/internal/table"
)

// A reload that changes a limit's numbers must neither renew a budget nor block
// anybody for longer than the new numbers say. While the old configuration still
// runs, and if the new one fails, the debts must stay as they are. And there may
// be a million of them, for which no request may wait.
//
// So debts are kept in a ledger, together with the numbers that they are measured
// in: whoever decides takes both from there, whichever configuration his request
// came by. The first request after a new configuration has taken over opens a new
// ledger. A key's debt moves when it is asked for, and those that nobody asks for
// move in the background.
//
// What a thread is about to do in the ledger before, in the very moment in which
// another is opened, stays behind, for each request that is just between the two:
// its charge is lost, or its ban, or what it gives back, and it passes where the
// key's debt has moved already. And what a request was charged in one ledger and
// gives back in the next, because something else denied it, is measured wrongly: it
// gives back more or less than that, and never more than the key owes.

// ledger holds the debts of one limit.
type ledger struct {
	limitNumbers
	*table.Table

	since  int64                  // when it was opened
	before atomic.Pointer[ledger] // whose debts have not all moved; nil: they have
	moving [64]sync.Mutex         // by the key's upper bits: each debt moves before it is looked at

	// Keys forgotten before the ledger before was opened, without debt and with; in
	// the end those of that ledger too. Changed while nothing moves.
	debtFree, indebted uint64
}

// limitNumbers are the numbers of a limit that its debts depend on.
type limitNumbers struct {
	gcra
	maxKeys int
}

func newLedger(numbers limitNumbers) *ledger {
	return &ledger{limitNumbers: numbers, Table: table.New(numbers.maxKeys)}
}

// adopt puts this limit's numbers in force if its configuration is the one that
// runs.
func (l *Limit) adopt(now int64) {
	if s := l.state; s.ledger.Load().limitNumbers != l.numbers && l.app.running() && s.open(l.numbers, now) {
		go s.gather(now)
	}
}

// open opens a ledger with other numbers, of which gather must be called once.
// It does nothing while debts still move into the one that is open, or while
// another request opens it: there is no waiting for a large table to be made.
func (s *limitState) open(numbers limitNumbers, now int64) bool {
	if !s.opening.TryLock() {
		return false
	}
	defer s.opening.Unlock()
	before := s.ledger.Load()
	if before.before.Load() != nil || before.limitNumbers == numbers {
		return false
	}
	next := newLedger(numbers)
	next.since = now
	next.debtFree, next.indebted = before.debtFree, before.indebted
	next.before.Store(before)
	s.ledger.Store(next)
	s.pending.follow(numbers.gcra, now)
	s.denied.Store(nil) // what was denied by other numbers
	return true
}

// gather moves all debts into the ledger that is open.
func (s *limitState) gather(now int64) {
	into := s.ledger.Load()
	before := into.before.Load()
	for key := range before.All() {
		into.move(key, now)
	}
	into.whileNothingMoves(func() {
		debtFree, indebted := before.Table.Forgotten()
		into.debtFree += debtFree
		into.indebted += indebted
		into.before.Store(nil)
	})
}

// whileNothingMoves calls f while no debt is on its way from the ledger before.
func (l *ledger) whileNothingMoves(f func()) {
	for i := range l.moving {
		l.moving[i].Lock()
		defer l.moving[i].Unlock()
	}
	f()
}

// of returns the ledger that is open, with what the key owes in it.
func (s *limitState) of(key uint64, now int64) *ledger {
	l := s.ledger.Load()
	if l.before.Load() != nil {
		l.move(key, now)
		l.move(banKey(key), now)
	}
	return l
}

// move moves what a key owes in the ledger before into this one. Bans keep their
// end.
func (l *ledger) move(key uint64, now int64) {
	moving := &l.moving[key>>58]
	moving.Lock()
	defer moving.Unlock()
	before := l.before.Load()
	if before == nil {
		return
	}
	tat, known := before.Delete(key)
	if !known {
		return
	}
	if !isBan(key) {
		tat = l.rescaled(tat, before.gcra, l.since)
	}
	l.Move(key, now, tat)
}

// Forgotten returns how many keys were let go, as [table.Table.Forgotten] does.
func (l *ledger) Forgotten() (debtFree, indebted uint64) {
	l.whileNothingMoves(func() {
		debtFree, indebted = l.debtFree, l.indebted
		tables := []*table.Table{l.Table}
		if before := l.before.Load(); before != nil {
			tables = append(tables, before.Table)
		}
		for _, t := range tables {
			free, owing := t.Forgotten()
			debtFree += free
			indebted += owing
		}
	})
	return debtFree, indebted
}

// Len returns how many keys are held.
func (l *ledger) Len() int {
	n := l.Table.Len()
	if before := l.before.Load(); before != nil {
		n += before.Len()
	}
	return n
}

// All iterates over all keys and their TATs by this ledger's numbers. A key that
// moves meanwhile may come twice.
func (l *ledger) All() iter.Seq2[uint64, int64] {
	return func(yield func(uint64, int64) bool) {
		if before := l.before.Load(); before != nil {
			for key, tat := range before.All() {
				if !isBan(key) {
					tat = l.rescaled(tat, before.gcra, l.since)
				}
				if !yield(key, tat) {
					return
				}
			}
			l.whileNothingMoves(func() {}) // what was on its way comes now
		}
		for key, tat := range l.Table.All() {
			if !yield(key, tat) {
				return
			}
		}
	}
}

// converted is what a request adds to a TAT by these numbers, that would add so
// much by others.
func (g gcra) converted(increment int64, from gcra) int64 {
	if g == from || increment == math.MaxInt64 { // a cost that never passes
		return increment
	}
	most := g.tolerance
	if increment > from.tolerance { // the share of a burst that is smaller than the request
		most = int64(maxToleranceInTime)
	}
	n := math.Ceil(float64(increment) / float64(from.emissionInterval) * float64(g.emissionInterval))
	if n > float64(most) {
		return math.MaxInt64
	}
	return int64(n)
}
