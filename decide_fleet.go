package edgelimit

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// With a store that instances share, limits and in_flights are charged there,
// all of a request's in one call and all or nothing. What this instance learns
// on the way is kept in its own tables: it answers for a denied key until its
// wait is over, which costs the store nothing, and it is what shares are counted
// against while the store cannot be asked.

// sharedCharge is a charge in the store.
type sharedCharge struct {
	StoreCharge
	fleet *fleet
	limit *Limit         // nil: of an in_flight
	key   uint64         // what the key is here
	left  *time.Duration // that the request may still wait for the store, in all
}

// takeShared charges in the store what is kept there. Where something denies it
// returns the number of that charge, else -1. What the store could not be asked
// about is left to this instance, as on_failure says.
func (h *Handler) takeShared(charges []charge, materials [][]byte, now int64) (denied int, wait time.Duration) {
	var asked []StoreCharge
	var of []int // which of the charges
	for i := range charges {
		c := &charges[i]
		if c.skip {
			continue
		}
		switch b := c.budget.(type) {
		case *Limit:
			b.anticipate(h.fleet, c.key, c.increment, now)
			asked = append(asked, b.storeCharge(h.fleet, materials[i], c.increment))
		case *InFlight:
			asked = append(asked, b.storeCharge(h.fleet, materials[i]))
		default:
			continue
		}
		last := &asked[len(asked)-1]
		last.ID, last.Observe = h.fleet.newID(), h.observes(c.budget)
		of = append(of, i)
	}
	if len(asked) == 0 {
		return -1, 0
	}
	err := h.fleet.call(h.fleet.timeout, func(ctx context.Context, conn StoreConn) error { return conn.Take(ctx, asked) })
	if err != nil {
		sent := !errors.Is(err, errStoreUnusable) && storeErrorKind(err) != StoreStale
		return h.takeAlone(charges, of, asked, sent, now)
	}
	answered := h.now()
	left := h.fleet.timeout - time.Duration(answered-now)
	for n, i := range of {
		c, answer := &charges[i], &asked[n]
		if limit, ok := c.budget.(*Limit); ok {
			// By an earlier moment a wait would seem to be over before it is for the store,
			// and each instance of a flood would ask once more.
			limit.learn(c.key, answer, answered, false)
		}
		if !answer.Denied {
			continue
		}
		if !answer.Observe {
			return i, answer.Wait
		}
		c.skip = true
		h.wouldRefuse(c, answer.Wait, now)
	}
	for n, i := range of {
		c := &charges[i]
		if c.skip {
			continue
		}
		c.shared = &sharedCharge{StoreCharge: asked[n], fleet: h.fleet, key: c.key, left: &left}
		if c.shared.limit, c.free = c.budget.(*Limit); !c.free { // an in_flight counts here too
			h.fleet.enter(asked[n], true)
		}
	}
	return -1, 0
}

// takeAlone is for when the store cannot be asked. sent says whether the call may
// have been carried out all the same.
func (h *Handler) takeAlone(charges []charge, of []int, asked []StoreCharge, sent bool, now int64) (denied int, wait time.Duration) {
	for n, i := range of {
		c := &charges[i]
		limit, isLimit := c.budget.(*Limit)
		if !isLimit {
			// if the request runs, the store should know as soon as it can
			c.shared = &sharedCharge{StoreCharge: asked[n], fleet: h.fleet, left: new(time.Duration)}
			h.fleet.enter(asked[n], sent)
		}
		switch h.fleet.onFailure() {
		case onFailureOpen:
			c.free = true
		case onFailureClosed:
			if h.observes(c.budget) {
				c.skip = true
				h.wouldRefuse(c, 0, now)
				continue
			}
			for _, earlier := range of[:n+1] {
				charges[earlier].giveBackShared()
			}
			return i, 0
		default:
			if !isLimit {
				c.increment = h.fleet.share(c.increment)
			} else if h.fleet.onFailure() == onFailureLocal {
				c.increment = limit.shareOf(c.increment, h.fleet.size())
			}
		}
	}
	return -1, 0
}

// giveBack undoes the charge for a request that something else denied, or that
// has ended. Nobody waits for it, but whoever's next request should find it.
func (s *sharedCharge) giveBack() {
	switch {
	case s.limit == nil:
		s.fleet.finish(s.left, func() { s.fleet.exit(s.StoreCharge) })
	case !s.Peek:
		s.fleet.finish(s.left, func() { s.tell(StoreConn.GiveBack, true) })
	}
}

// charge charges what was only asked about.
func (s *sharedCharge) charge() {
	s.Peek, s.Late = false, true
	s.fleet.finish(s.left, func() { s.tell(StoreConn.Take, false) })
}

// tell makes a call about a limit's key, and keeps what it says of it. If it
// fails, the charge stays as it was.
func (s *sharedCharge) tell(what func(StoreConn, context.Context, []StoreCharge) error, lower bool) {
	told := []StoreCharge{s.StoreCharge}
	err := s.fleet.call(s.fleet.timeout, func(ctx context.Context, conn StoreConn) error { return what(conn, ctx, told) })
	if err == nil {
		s.limit.learn(s.key, &told[0], clock(), lower)
	}
}

// storeCharge describes the limit's charge for the store.
func (l *Limit) storeCharge(f *fleet, material []byte, increment int64) StoreCharge {
	return StoreCharge{
		Key:       f.key(StoreLimit, l.Name, material),
		Increment: time.Duration(increment),
		Tolerance: time.Duration(l.gcra.tolerance),
		Ban:       time.Duration(l.Ban), Extend: l.Extend,
		Returns: l.OnStatus != nil && !l.OnStatus.Late,
		Peek:    l.late(),
	}
}

// learn keeps what the store said of a key. A denial is remembered until its
// wait is over: until then the debt only grows, unless something is given back.
// Only that lowers what is known here: what a share has allowed stays used, or
// each answer between two that fail would renew the share.
func (l *Limit) learn(key uint64, answer *StoreCharge, now int64, lower bool) {
	l.adopt(now)
	debts := l.state.of(key, now)
	tat := now + int64(answer.Debt)
	if debts.gcra != l.gcra {
		tat = debts.rescaled(tat, l.gcra, now)
	}
	if !lower {
		tat = max(tat, debts.Peek(key, now))
	}
	debts.Set(key, now, tat)
	if answer.BanLeft > 0 {
		debts.Set(banKey(key), now, now+int64(answer.BanLeft))
	}
	if answer.Denied && l.OnStatus == nil {
		l.state.deniedKeys(l.numbers.maxKeys).Set(key, now, now+int64(min(answer.Wait, denyCacheTime)))
	}
}

// anticipate counts a request of a key that was denied lately as if the store had
// charged it already. In the moment in which a wait is over many requests of a
// flood are there: so each instance asks for no more of them than can pass, by
// what it knows, and the store knows of no less debt. Asking for all of
// them would be a call for each.
func (l *Limit) anticipate(f *fleet, key uint64, increment, now int64) {
	denials := l.state.denied.Load()
	if denials == nil || l.OnStatus != nil || !f.usable.Load() {
		return
	}
	if over := denials.Peek(key, now); over == 0 || over > now || now-over > int64(denyCacheTime) {
		return
	}
	debts := l.state.of(key, now)
	if _, ok := debts.Add(key, now, debts.converted(increment, l.gcra), debts.tolerance); ok {
		denials.Set(key, now, now+int64(min(f.timeout, denyCacheTime)))
	}
}

// knownDenied says whether the store has denied the key, and would again.
func (l *Limit) knownDenied(key uint64, increment, now int64) (wait time.Duration, denied bool) {
	denials := l.state.denied.Load()
	if denials == nil || denials.Peek(key, now) <= now {
		return 0, false
	}
	debts := l.state.of(key, now)
	wait, ok := debts.peek(debts.Table, key, debts.converted(increment, l.gcra), now)
	if ban := l.banned(key, now); ban > 0 {
		return max(wait, ban), true
	}
	return wait, !ok
}

// shareOf is what a request adds to a TAT where the limit's rate is divided by
// the number of instances: as much more, so that a debt stays the same part of
// the budget.
func (l *Limit) shareOf(increment int64, instances int) int64 {
	return min(increment, int64(maxToleranceInTime)/int64(instances)) * int64(instances)
}

// storeCharge describes the in_flight's charge for the store.
func (f *InFlight) storeCharge(fleet *fleet, material []byte) StoreCharge {
	return StoreCharge{Key: fleet.key(StoreInFlight, f.Name, material), Max: f.Max, TTL: inFlightTTL}
}

// minSharedInterval keeps the store's whole microseconds within a tenth of what
// the rate says.
const minSharedInterval = 10 * time.Microsecond

// requireShareable refuses rates that a store cannot count.
func (l *Limit) requireShareable() error {
	if l.app.fleet != nil && l.rate.emissionInterval() < minSharedInterval {
		return fmt.Errorf("rate %s: with a store that instances share at most 100000 a second of one key are possible", l.Rate)
	}
	return nil
}
