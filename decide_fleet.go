package edgelimit

import (
	"context"
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
	left  time.Duration // that the request may still wait for the store
}

// takeShared charges in the store what is kept there. Where something denies it
// returns that, and nothing is charged. What the store could not be asked about
// is left to this instance, as on_failure says.
func (h *Handler) takeShared(state *requestState, charges []charge, now int64) (denied *charge, wait time.Duration) {
	var asked []StoreCharge
	var of []*charge
	for i := range charges {
		c := &charges[i]
		if c.skip {
			continue
		}
		switch b := c.budget.(type) {
		case *Limit:
			asked = append(asked, b.storeCharge(h.fleet, state))
		case *InFlight:
			asked = append(asked, b.storeCharge(h.fleet, state))
		default:
			continue
		}
		last := &asked[len(asked)-1]
		last.ID, last.Observe = h.fleet.newID(), h.observes(c.budget)
		if last.Key.Kind == StoreLimit {
			last.Increment = time.Duration(c.increment)
		}
		of = append(of, c)
	}
	if len(asked) == 0 {
		return nil, 0
	}
	err := h.fleet.call(h.fleet.timeout, func(ctx context.Context, conn StoreConn) error { return conn.Take(ctx, asked) })
	if err != nil {
		return h.takeAlone(of, asked, now)
	}
	left := h.fleet.timeout - time.Duration(clock()-now)
	for i, c := range of {
		answer := &asked[i]
		if limit, ok := c.budget.(*Limit); ok {
			limit.learn(c.key, answer, now)
		}
		if !answer.Denied {
			continue
		}
		if !answer.Observe {
			return c, answer.Wait
		}
		c.skip = true
		h.wouldRefuse(c, answer.Wait, now)
	}
	for i, c := range of {
		if c.skip {
			continue
		}
		c.shared = &sharedCharge{asked[i], h.fleet, left}
		if _, c.free = c.budget.(*Limit); !c.free { // an in_flight counts here too
			h.fleet.enter(asked[i])
		}
	}
	return nil, 0
}

// takeAlone is for when the store cannot be asked.
func (h *Handler) takeAlone(of []*charge, asked []StoreCharge, now int64) (denied *charge, wait time.Duration) {
	for i, c := range of {
		limit, isLimit := c.budget.(*Limit)
		if !isLimit {
			// The call may have been carried out all the same, and if the request
			// runs, the store should know.
			c.shared = &sharedCharge{StoreCharge: asked[i], fleet: h.fleet}
			h.fleet.enter(asked[i])
		}
		switch h.fleet.onFailure() {
		case onFailureOpen:
			c.free = true
		case onFailureClosed:
			if !h.observes(c.budget) {
				for _, earlier := range of[:i+1] {
					earlier.giveBackShared()
				}
				return c, 0
			}
			c.skip = true
			h.wouldRefuse(c, 0, now)
		default:
			if !isLimit {
				c.increment = h.fleet.share(c.increment)
			} else if h.fleet.onFailure() == onFailureLocal {
				c.increment = limit.shareOf(c.increment, h.fleet.size())
			}
		}
	}
	return nil, 0
}

// giveBack undoes the charge for a request that something else denied, or that
// has ended. Nobody waits for it, but whoever's next request should find it.
func (s *sharedCharge) giveBack(c *charge) {
	if s.Key.Kind == StoreInFlight {
		s.fleet.finish(s.left, func() { s.fleet.exit(s.StoreCharge) })
		return
	}
	if s.Peek {
		return
	}
	s.fleet.finish(s.left, func() {
		back := []StoreCharge{s.StoreCharge}
		err := s.fleet.call(s.fleet.timeout, func(ctx context.Context, conn StoreConn) error { return conn.GiveBack(ctx, back) })
		if err == nil { // else it counts as charged
			c.budget.(*Limit).learn(c.key, &back[0], clock())
		}
	})
}

// charge charges what was only asked about.
func (s *sharedCharge) charge(c *charge) {
	late := []StoreCharge{s.StoreCharge}
	late[0].Peek, late[0].Ban = false, 0
	s.fleet.finish(s.left, func() {
		if s.fleet.call(s.fleet.timeout, func(ctx context.Context, conn StoreConn) error { return conn.Take(ctx, late) }) == nil {
			c.budget.(*Limit).learn(c.key, &late[0], clock())
		}
	})
}

// storeCharge describes the limit's charge for the store.
func (l *Limit) storeCharge(f *fleet, state *requestState) StoreCharge {
	var m keyMaterial
	l.template.material(&state.resolution, state.repl, &m)
	return StoreCharge{
		Key:       f.key(StoreLimit, l.Name, m.bytes[:m.n]),
		Tolerance: time.Duration(l.gcra.tolerance),
		Ban:       time.Duration(l.Ban), Extend: l.Extend,
		Returns: l.OnStatus != nil && !l.OnStatus.Late,
		Peek:    l.late(),
	}
}

// learn keeps what the store said of a key. A denial is remembered until its
// wait is over: until then the debt only grows, unless something is given back.
func (l *Limit) learn(key uint64, answer *StoreCharge, now int64) {
	l.adopt(now)
	l.state.buckets.Set(key, now, now+int64(answer.Debt))
	if answer.BanLeft > 0 {
		l.state.buckets.Set(banKey(key), now, now+int64(answer.BanLeft))
	}
	if answer.Denied && l.OnStatus == nil {
		l.state.deniedKeys(l.numbers.maxKeys).Set(key, now, now+int64(min(answer.Wait, denyCacheTime)))
	}
}

// knownDenied says whether the store has denied the key, and would again.
func (l *Limit) knownDenied(key uint64, increment, now int64) (wait time.Duration, denied bool) {
	denials := l.state.denied.Load()
	if denials == nil || denials.Peek(key, now) <= now {
		return 0, false
	}
	wait, ok := l.gcra.peek(l.state.buckets, key, increment, now)
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
func (f *InFlight) storeCharge(fleet *fleet, state *requestState) StoreCharge {
	var m keyMaterial
	f.template.material(&state.resolution, state.repl, &m)
	return StoreCharge{Key: fleet.key(StoreInFlight, f.Name, m.bytes[:m.n]), Max: f.Max, TTL: inFlightTTL}
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
