package edgelimit

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// A ceiling of a fleet is handed out by the store in leases: some permits at a
// time, which hold within one slot of the window. What makes it strict is that
// any slots that a window can touch have together no more permits than the
// ceiling's count; what an instance does with its permits, and whether it lives,
// changes nothing about that. A crash only wastes what it held.

// lease are the permits that this instance holds of one ceiling. Only one call
// for more is under way at a time. The zero value holds none.
type lease struct {
	mu      sync.Mutex
	permits int64
	serial  int64 // of this lease; marks of an older one are void
	slot    int64 // on the store's clock
	until   int64 // on ours, counted from before the call: never later than the slot's end

	deniedUntil int64 // the store has nothing to give until then, or is not asked
	passesAt    int64 // when it can give something, as far as it is known

	calling chan struct{} // closed when the call under way is done; nil: none is
	waiting int64         // requests that wait for it
	asked   int64         // when the last lease was asked for
	wanted  int64         // requests since then
	spent   int64         // of these, admitted without the store
	spentAt int64

	used   int64 // by all instances in the window that ended at usedAt
	usedAt int64
}

const (
	leaseSlots      = 64                     // in a window, where these are not too short
	minLeaseSlot    = 50 * time.Millisecond  // several calls long
	minLeaseSlots   = 10                     // of a short window
	minLeasedWindow = 100 * time.Millisecond // whose slots are hardly longer than a call
	leaseAhead      = 50 * time.Millisecond  // a lease is for what comes in this time
	maxLeaseHeld    = time.Second            // what is not used by then others may want
)

// leaseSlotsOf cuts a window into slots.
func leaseSlotsOf(window time.Duration) (slots int64, slot time.Duration) {
	slots = min(leaseSlots, max(minLeaseSlots, int64(window/minLeaseSlot)))
	slot = (window + time.Duration(slots) - 1) / time.Duration(slots)
	return slots, (slot + time.Microsecond - 1).Truncate(time.Microsecond)
}

// requireShareable refuses windows that are too short for leases.
func (c *Ceiling) requireShareable() error {
	if c.app.fleet != nil && c.rate.window < minLeasedWindow {
		return fmt.Errorf("rate %s: with a store that instances share the window must be at least %s", c.Rate, minLeasedWindow)
	}
	return nil
}

// takeLeased admits a request by a permit that the store has granted. Where it
// cannot be asked, on_failure says what holds. mark is the lease that giveBack
// wants, or 0.
func (c *Ceiling) takeLeased(now int64) (mark int64, wait time.Duration, ok bool) {
	fleet, l := c.app.fleet, &c.state.lease
	mark, wait, err := l.take(c, now)
	switch {
	case err == nil && mark == 0:
		return 0, wait, false
	case err == nil:
		c.state.window.note(now) // what this instance's share is counted against
		return mark, 0, true
	}
	switch fleet.onFailure() {
	case onFailureOpen:
		c.state.window.note(now)
	case onFailureClosed:
		return 0, 0, false
	default:
		if _, wait, ok = c.state.window.takeOf(fleet.share(c.rate.count), now); !ok {
			return 0, wait, false
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if now-l.spentAt > int64(c.rate.window) {
		l.spent = 0
	}
	l.spent++
	l.spentAt = now
	return 0, 0, true
}

// peek says whether there may be a permit, without asking the store.
func (l *lease) peek(now int64) (wait time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.permits > 0 && now < l.until || now >= l.deniedUntil {
		return 0, true
	}
	return l.waitAt(now), false
}

func (l *lease) waitAt(now int64) time.Duration {
	return time.Duration(max(l.passesAt, l.deniedUntil) - now)
}

// take uses a permit, for which it asks the store if there is none. mark is 0
// where none is left; then wait says for how long.
func (l *lease) take(c *Ceiling, now int64) (mark int64, wait time.Duration, err error) {
	fleet := c.app.fleet
	deadline := now + int64(fleet.timeout)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wanted++
	now = clock() // it may have waited for its other budgets
	for {
		switch {
		case l.permits > 0 && now < l.until:
			l.permits--
			return l.serial, 0, nil
		case now < l.deniedUntil:
			return 0, l.waitAt(now), nil
		case now >= deadline:
			return 0, 0, errStoreUnusable
		case l.calling == nil:
			err = l.ask(c, now, deadline)
		default:
			l.await(deadline - now)
		}
		if err != nil {
			return 0, 0, err
		}
		now = clock()
	}
}

// await waits for the call that another request makes. l.mu is held before and
// after.
func (l *lease) await(most int64) {
	calling := l.calling
	l.waiting++
	l.mu.Unlock()
	timer := time.NewTimer(time.Duration(most))
	defer timer.Stop()
	select {
	case <-calling:
	case <-timer.C:
	}
	l.mu.Lock()
	l.waiting--
}

// ask gets a lease. l.mu is held before and after, not during the call.
func (l *lease) ask(c *Ceiling, now, deadline int64) error {
	fleet := c.app.fleet
	slots, slot := leaseSlotsOf(c.rate.window)
	request := LeaseRequest{
		Key: fleet.key(StoreCeiling, c.Name, nil), Count: c.rate.count, Slot: slot, Slots: slots,
		Want: l.demand(c.rate.count, now), Spent: l.spent,
	}
	if now-l.spentAt > int64(c.rate.window) {
		request.Spent = 0
	}
	request.Over, request.Unused = l.slot, l.permits
	l.permits, l.spent = 0, 0
	l.calling = make(chan struct{})
	l.mu.Unlock()

	var got Lease
	err := fleet.call(time.Duration(deadline-now), func(ctx context.Context, conn StoreConn) (err error) {
		got, err = conn.Lease(ctx, request)
		return err
	})

	l.mu.Lock()
	close(l.calling)
	l.calling = nil
	l.asked, l.wanted = now, 0
	if err != nil {
		l.spent += request.Spent
		return err
	}
	l.used, l.usedAt = got.Used, now
	if got.Granted == 0 {
		l.passesAt = now + int64(got.Wait)
		l.deniedUntil = now + int64(min(got.Wait, slot, denyCacheTime))
		return nil
	}
	held := min(got.Left, maxLeaseHeld)
	l.permits, l.slot, l.until = got.Granted, got.Slot, now+int64(held)
	l.serial++
	serial := l.serial
	time.AfterFunc(held, func() { l.hand(c, serial) })
	return nil
}

// demand is how many permits to ask for: what comes in a while, if it goes on as
// it did since the last lease, and what waits already.
func (l *lease) demand(count, now int64) int64 {
	since := max(now-l.asked, int64(time.Millisecond))
	ahead := l.wanted * int64(leaseAhead) / since
	return min(max(ahead, l.waiting+1), count)
}

// hand returns the permits of a lease that is over, so that others can use them.
func (l *lease) hand(c *Ceiling, serial int64) {
	now := clock()
	l.mu.Lock()
	if l.serial != serial || l.permits == 0 || now < l.until || l.calling != nil {
		l.mu.Unlock()
		return
	}
	slots, slot := leaseSlotsOf(c.rate.window)
	fleet := c.app.fleet
	request := LeaseRequest{
		Key: fleet.key(StoreCeiling, c.Name, nil), Count: c.rate.count, Slot: slot, Slots: slots,
		Over: l.slot, Unused: l.permits,
	}
	l.permits = 0
	l.mu.Unlock()
	_ = fleet.call(fleet.timeout, func(ctx context.Context, conn StoreConn) error { // else they are wasted
		_, err := conn.Lease(ctx, request)
		return err
	})
}

// giveBack returns a permit, for a request that was denied by something else in
// the same moment.
func (l *lease) giveBack(mark, now int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if mark != 0 && mark == l.serial && now < l.until {
		l.permits++
	}
}

// usedRatio is how much of the ceiling's count the current window has used: by
// all instances, if a store told it in the last window, else by this one.
func (s *ceilingState) usedRatio(now int64) float64 {
	l, r := &s.lease, s.inForce.Load()
	l.mu.Lock()
	used, known := l.used, l.usedAt != 0 && now-l.usedAt <= int64(r.window)
	l.mu.Unlock()
	if known {
		return float64(used) / float64(r.count)
	}
	return s.window.usedRatio(now)
}
