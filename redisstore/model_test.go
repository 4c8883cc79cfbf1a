package redisstore

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	edgelimit "github.com/edgelimit/caddy-edgelimit"
)

// The scripts against a slow and obvious model of what they should do. Real time
// goes by between calls; the server says in each answer what time it was, and
// the model takes that for now.

// modelLimit is what a key of a limit owes, in microseconds.
type modelLimit struct {
	tat, tolerance, ban int64
	pending             []modelCharge // that may still be given back
}

type modelCharge struct {
	id             string
	own, increment int64
}

type model struct {
	limits  map[edgelimit.StoreKey]*modelLimit
	running map[edgelimit.StoreKey]map[string]bool
}

func (l *modelLimit) clone() *modelLimit {
	if l == nil {
		return nil
	}
	clone := *l
	clone.pending = slices.Clone(l.pending)
	return &clone
}

func us(d time.Duration) int64 { return int64((d + time.Microsecond - 1) / time.Microsecond) }

// at brings a limit to these numbers and this time.
func (m *model) at(key edgelimit.StoreKey, tolerance, now int64) *modelLimit {
	l := m.limits[key]
	if l == nil || l.tat <= now && l.ban <= now {
		l = &modelLimit{tolerance: tolerance}
		m.limits[key] = l
	}
	l.pending = slices.DeleteFunc(l.pending, func(c modelCharge) bool { return c.own <= now })
	if l.tolerance != tolerance {
		scale := func(debt int64) int64 {
			scaled := float64(debt) * (float64(tolerance) / float64(l.tolerance))
			if up := int64(scaled); float64(up) < scaled {
				return up + 1
			}
			return int64(scaled)
		}
		if l.tat > now {
			l.tat = now + min(tolerance, scale(l.tat-now))
		}
		for i := range l.pending {
			l.pending[i].own = now + scale(l.pending[i].own-now)
			l.pending[i].increment = scale(l.pending[i].increment)
		}
		l.tolerance = tolerance
	}
	l.tat, l.ban = max(l.tat, now), max(l.ban, now)
	return l
}

// take says what the answers should be.
func (m *model) take(charges []edgelimit.StoreCharge, now int64) []edgelimit.StoreCharge {
	want := slices.Clone(charges)
	denied := false
	// what is changed only if nothing denies, or in any case
	var charge []func()
	for i := range want {
		w := &want[i]
		*w = edgelimit.StoreCharge{}
		c := charges[i]
		if denied {
			continue // it was not looked at
		}
		if c.Key.Kind == edgelimit.StoreInFlight {
			w.Denied = int64(len(m.running[c.Key])) >= c.Max
			if !w.Denied {
				charge = append(charge, func() {
					if m.running[c.Key] == nil {
						m.running[c.Key] = map[string]bool{}
					}
					m.running[c.Key][c.ID] = true
				})
			}
		} else {
			before := m.limits[c.Key].clone()
			l := m.at(c.Key, us(c.Tolerance), now)
			if us(c.Ban) == 0 {
				l.ban = now
			}
			l.ban = min(l.ban, now+us(c.Ban))
			wait := max(l.tat-now+us(c.Increment)-us(c.Tolerance), l.ban-now, 0)
			if c.Late {
				wait = max(l.tat-now+us(c.Increment)-us(c.Tolerance), 0)
			}
			w.Denied = wait > 0
			if w.Denied && c.Ban > 0 && !c.Look && !c.Late && (c.Extend || l.ban == now) {
				l.ban = now + us(c.Ban)
				wait = max(wait, us(c.Ban))
			}
			w.Wait = time.Duration(wait) * time.Microsecond
			w.Debt, w.BanLeft = time.Duration(l.tat-now)*time.Microsecond, time.Duration(l.ban-now)*time.Microsecond
			if c.Look {
				m.limits[c.Key] = before
			}
			if !w.Denied && !c.Peek {
				charge = append(charge, func() {
					l.tat += us(c.Increment)
					w.Debt += time.Duration(us(c.Increment)) * time.Microsecond
					if c.Returns {
						l.pending = append(l.pending, modelCharge{c.ID, l.tat, us(c.Increment)})
					}
				})
			}
		}
		denied = w.Denied && !c.Observe
	}
	if !denied {
		for _, f := range charge {
			f()
		}
	}
	return want
}

func (m *model) giveBack(c edgelimit.StoreCharge, now int64) {
	if c.Key.Kind == edgelimit.StoreInFlight {
		delete(m.running[c.Key], c.ID)
		return
	}
	l := m.at(c.Key, us(c.Tolerance), now)
	own, increment := c.TAT, us(c.Increment)
	if c.Returns {
		i := slices.IndexFunc(l.pending, func(p modelCharge) bool { return p.id == c.ID })
		if i < 0 {
			return
		}
		own, increment = l.pending[i].own, l.pending[i].increment
		l.pending = slices.Delete(l.pending, i, i+1)
	}
	back := max(0, min(increment, own-now))
	for i := range l.pending {
		if l.pending[i].own > own {
			l.pending[i].own -= back
		}
	}
	l.tat -= min(back, l.tat-now)
}

func TestScriptsAgainstModel(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	c := connect(t)
	ctx := context.Background()
	m := &model{limits: map[edgelimit.StoreKey]*modelLimit{}, running: map[edgelimit.StoreKey]map[string]bool{}}
	var taken []edgelimit.StoreCharge
	counts := map[string]int{}

	for step := range 6000 {
		if len(taken) > 0 && random.IntN(3) == 0 {
			i := random.IntN(len(taken))
			back := []edgelimit.StoreCharge{taken[i]}
			taken = slices.Delete(taken, i, i+1)
			before := back[0]
			if err := c.GiveBack(ctx, back); err != nil {
				t.Fatal(err)
			}
			m.giveBack(before, back[0].TAT-us(back[0].Debt))
			if l := m.limits[before.Key]; l != nil && max(l.tat, back[0].TAT-us(back[0].Debt)) != back[0].TAT {
				t.Fatalf("step %d: %s was given back: TAT %d, want %d", step, show(before), back[0].TAT, l.tat)
			}
			counts["given back"]++
			continue
		}
		charges := randomCharges(random, step)
		if err := c.Take(ctx, charges); err != nil {
			t.Fatal(err)
		}
		now := charges[0].TAT - us(charges[0].Debt)
		want := m.take(charges, now)
		denied := false
		for i := range charges {
			got, w := charges[i], want[i]
			if got.Denied != w.Denied || got.Wait != w.Wait || !denied && (got.Debt != w.Debt || got.BanLeft != w.BanLeft) {
				t.Fatalf("step %d, charge %d of %d: %s\ngot  denied %t, debt %s, wait %s, ban %s\nwant denied %t, debt %s, wait %s, ban %s", step, i, len(charges),
					show(got), got.Denied, got.Debt, got.Wait, got.BanLeft, w.Denied, w.Debt, w.Wait, w.BanLeft)
			}
			denied = denied || w.Denied && !got.Observe
			counts[fmt.Sprintf("denied %t", got.Denied)]++
		}
		if !denied {
			for _, charge := range charges {
				if !charge.Denied && !charge.Peek {
					taken = append(taken, charge)
				}
			}
		}
	}
	for _, outcome := range []string{"given back", "denied true", "denied false"} {
		if counts[outcome] < 300 {
			t.Errorf("%s: only %d, which tries too little", outcome, counts[outcome])
		}
	}
}

// randomCharges are those of one request: different keys, of few.
func randomCharges(random *rand.Rand, step int) []edgelimit.StoreCharge {
	pick := func(d ...time.Duration) time.Duration { return d[random.IntN(len(d))] }
	plain := random.IntN(3) == 0 // as most requests are, which has a way of its own
	var charges []edgelimit.StoreCharge
	for n, key := range random.Perm(6)[:1+random.IntN(3)] {
		charge := edgelimit.StoreCharge{ID: fmt.Sprintf("i%d.%d", step, n), Observe: !plain && random.IntN(6) == 0}
		if key == 5 {
			charge.Key, charge.Max, charge.TTL = keyNumber(edgelimit.StoreInFlight, 1), 3, time.Minute
			charges = append(charges, charge) // its answer tells no time: never first
			continue
		}
		interval := pick(time.Millisecond, 10*time.Millisecond, time.Second/3)
		charge.Key = keyNumber(edgelimit.StoreLimit, key)
		charge.Tolerance = interval * pick(1, 5, 20)
		charge.Increment = min(interval*pick(1, 1, 1, 2), charge.Tolerance)
		if plain && key != 1 { // whose charges may all be given back
			charges = append([]edgelimit.StoreCharge{charge}, charges...)
			continue
		}
		charge.Ban, charge.Extend = pick(0, 0, 5*time.Millisecond, 50*time.Millisecond), random.IntN(2) == 0
		charge.Returns, charge.Peek, charge.Look = key == 1, random.IntN(8) == 0, random.IntN(20) == 0
		charge.Peek = charge.Peek || charge.Look
		charge.Late = !charge.Peek && random.IntN(10) == 0
		charges = append([]edgelimit.StoreCharge{charge}, charges...)
	}
	if charges[0].Key.Kind == edgelimit.StoreInFlight {
		return randomCharges(random, step)
	}
	return charges
}

func show(c edgelimit.StoreCharge) string {
	return fmt.Sprintf("key %x increment %s tolerance %s ban %s extend %t returns %t peek %t look %t late %t observe %t",
		c.Key.Hash[:2], c.Increment, c.Tolerance, c.Ban, c.Extend, c.Returns, c.Peek, c.Look, c.Late, c.Observe)
}

// Any slots that a window can touch have together no more permits than the
// ceiling has, whatever is asked for, returned, or spent elsewhere.
func TestLeasesAgainstModel(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 2))
	c := connect(t)
	ctx := context.Background()
	request := edgelimit.LeaseRequest{Key: keyNumber(edgelimit.StoreCeiling, 1), Count: 50, Slot: 2 * time.Millisecond, Slots: 10}
	granted := map[int64]int64{} // by slot
	used := func(newest int64) (sum int64) {
		for slot := newest - request.Slots; slot <= newest; slot++ {
			sum += granted[slot]
		}
		return sum
	}
	full := 0
	for step := range 4000 {
		request.Want, request.Spent, request.Unused, request.Over = random.Int64N(8), 0, 0, 0
		if random.IntN(10) == 0 {
			request.Spent = random.Int64N(3)
		}
		if random.IntN(4) == 0 && len(granted) > 1 { // a slot that is over, known to us
			slots := make([]int64, 0, len(granted))
			for slot := range granted {
				slots = append(slots, slot)
			}
			request.Over = slots[random.IntN(len(slots))]
			if request.Over != slices.Max(slots) && granted[request.Over] > 0 {
				request.Unused = 1 + random.Int64N(granted[request.Over])
			} else {
				request.Over = 0
			}
		}
		got, err := c.Lease(ctx, request)
		if err != nil {
			t.Fatal(err)
		}
		for slot := range granted { // no slot can have more than that, whatever stands there
			granted[slot] = min(granted[slot], request.Count)
		}
		if request.Over >= got.Slot-request.Slots {
			granted[request.Over] -= request.Unused
		}
		granted[got.Slot] += request.Spent
		want := max(0, min(request.Want, request.Count-used(got.Slot)))
		if got.Granted != want {
			t.Fatalf("step %d: %d granted, want %d", step, got.Granted, want)
		}
		granted[got.Slot] += got.Granted
		if got.Used != used(got.Slot) {
			t.Fatalf("step %d: %d used, want %d", step, got.Used, used(got.Slot))
		}
		if got.Left <= 0 || got.Left > request.Slot {
			t.Fatalf("step %d: %s left of a slot of %s", step, got.Left, request.Slot)
		}
		if request.Want > 0 && got.Granted == 0 {
			full++
			if got.Wait <= 0 || got.Wait > request.Slot*time.Duration(request.Slots+1) {
				t.Fatalf("step %d: a wait of %s", step, got.Wait)
			}
		}
	}
	if full < 100 {
		t.Errorf("the ceiling was full %d times, which tries too little", full)
	}
}
