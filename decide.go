package edgelimit

import (
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// budget is what a request can count against: a limit, an in_flight or a
// ceiling. All are asked by key, except that a ceiling never looks at it.
type budget interface {
	name() string
	counters() *counters
	denials() *denialLog
	observed() bool

	// peek says whether a request would pass now, and how long it would have to
	// wait if not: 0 where nobody knows, or where waiting does not help.
	peek(key uint64, increment, now int64) (wait time.Duration, ok bool)

	// take charges a request. mark is what giveBack needs to undo it.
	take(key uint64, increment, now int64) (mark int64, wait time.Duration, ok bool)
	giveBack(key uint64, increment, mark, now int64)

	// report adds what is particular to its kind.
	report(*budgetReport)

	// deny is called for each denial and describes it.
	deny(key uint64, wait time.Duration, now int64) denial
}

// denial says what denied a request, and for how long. The zero value denies
// nothing.
type denial struct {
	name   string
	status int
	wait   time.Duration // 0: nobody knows, or waiting does not help
	quota  *quota        // of a limit, where responses tell it
	*refusal
}

// refusal is what a denial answers with, made once at load.
type refusal struct {
	err     error  // what error routes get
	problem []byte // what clients that accept JSON get where there are none
}

// charge is one budget that a request counts against, and how.
type charge struct {
	budget    budget
	key       uint64
	increment int64 // of a limit; of an in_flight, how many may run
	mark      int64
	skip      bool          // observed, and would deny: not charged
	free      bool          // passes without being charged
	shared    *sharedCharge // in the fleet's store; nil: it is this instance's own
}

// decide judges the request against all that applies to it: limits first, then
// what is in flight, ceilings last. It is all or nothing: a request that
// anything denies consumes nothing anywhere. Each name is charged once a
// request, however often handlers run. What was charged is appended to charges.
func (h *Handler) decide(r *http.Request, state *requestState, charges []charge, now int64) ([]charge, denial, error) {
	if !h.limits() && h.unresolved == unresolvedShare {
		return nil, denial{}, nil
	}
	if selected, err := h.matchers.AnyMatchWithError(r); err != nil || !selected {
		return nil, denial{}, err
	}
	// once denied for that, an error route may answer; a trial denies nothing yet
	if !state.resolved() && h.unresolved == unresolvedDeny && state.exceeded.name != unresolvedName {
		if !h.observe {
			unresolvedDenials.add(outcomeDenied)
			return nil, denialOfUnresolved, nil
		}
		if !state.judged(&unresolvedDenials) {
			state.judge(&unresolvedDenials)
			unresolvedDenials.add(outcomeWouldDeny)
		}
	}

	charges, materials, err := h.applicable(r, state, charges)
	if err != nil || len(charges) == 0 {
		return nil, denial{}, err
	}
	for i := range charges {
		state.judge(charges[i].budget.counters())
	}
	// Ask all before charging any. With a single one, charging asks.
	if len(charges) > 1 || h.fleet != nil {
		for i := range charges {
			c := &charges[i]
			if wait, ok := c.budget.peek(c.key, c.increment, now); !ok {
				if !h.observes(c.budget) {
					return nil, h.refuse(c, wait, now), nil
				}
				c.skip = true
				h.wouldRefuse(c, wait, now)
			}
		}
	}
	if h.fleet != nil {
		if denied, wait := h.takeShared(charges, materials, now); denied >= 0 {
			d := h.refuse(&charges[denied], wait, now)
			if wait == 0 {
				d.quota = nil // denied for want of the store: what is left of the limit says nothing
			}
			return nil, d, nil
		}
	}
	for i := range charges {
		c := &charges[i]
		if c.skip || c.free {
			continue
		}
		var wait time.Duration
		var ok bool
		if c.mark, wait, ok = c.budget.take(c.key, c.increment, now); ok {
			continue
		}
		// Alone, or another request was faster between asking and charging.
		if !h.observes(c.budget) {
			for j := range charges {
				charges[j].giveBackShared()
			}
			for _, earlier := range charges[:i] {
				earlier.giveBack(now)
			}
			return nil, h.refuse(c, wait, now), nil
		}
		c.skip = true
		h.wouldRefuse(c, wait, now)
	}
	for i := range charges {
		if !charges[i].skip {
			charges[i].budget.counters().add(outcomeAllowed)
		}
	}
	return charges, denial{}, nil
}

func (h *Handler) limits() bool { return len(h.keyed)+len(h.inFlight)+len(h.ceilings) > 0 }

// applicable lists what the request counts against, with its keys. Each is made
// right after its budget's own matchers have run: those of the next may write what
// its placeholders read, such as what a regular expression has found, and look at
// something that the caller chooses.
// With a store, materials are what these are made of, in the same order.
func (h *Handler) applicable(r *http.Request, state *requestState, charges []charge) (_ []charge, materials [][]byte, _ error) {
	for _, limit := range h.keyed {
		if ok, err := applies(r, state, limit, limit.matchers); err != nil {
			return nil, nil, err
		} else if !ok {
			continue
		}
		if limit.exempts(r, &state.resolution) || h.exemptsUnresolved(state) {
			state.exempt(limit)
			continue
		}
		c := charge{budget: limit, key: h.key(state, limit.Name, &limit.template), increment: h.increment(state, limit)}
		if limit.state.traffic.observe(c.key) {
			h.warnDominating(limit)
		}
		charges = append(charges, c)
		materials = h.appendMaterial(materials, &limit.template, state)
	}
	for _, inFlight := range h.inFlight {
		if ok, err := applies(r, state, inFlight, inFlight.matchers); err != nil {
			return nil, nil, err
		} else if !ok {
			continue
		}
		c := charge{budget: inFlight, increment: inFlight.Max}
		if inFlight.keyed() {
			if h.exemptsUnresolved(state) {
				state.exempt(inFlight)
				continue
			}
			c.key = h.key(state, inFlight.Name, &inFlight.template)
		}
		charges = append(charges, c)
		materials = h.appendMaterial(materials, &inFlight.template, state)
	}
	for _, ceiling := range h.ceilings {
		if ok, err := applies(r, state, ceiling, ceiling.matchers); err != nil {
			return nil, nil, err
		} else if ok {
			charges = append(charges, charge{budget: ceiling})
		}
	}
	return charges, materials, nil
}

// applies says whether a budget concerns the request and was not judged before.
func applies(r *http.Request, state *requestState, b budget, matchers caddyhttp.MatcherSets) (bool, error) {
	if state.judged(b.counters()) {
		return false, nil
	}
	return matchers.AnyMatchWithError(r)
}

// appendMaterial appends what a key is made of, where a store needs it.
func (h *Handler) appendMaterial(materials [][]byte, template *keyTemplate, state *requestState) [][]byte {
	if h.fleet == nil {
		return nil
	}
	material, _ := template.appendMaterial(nil, &state.resolution, state.repl)
	return append(materials, material)
}

func (h *Handler) key(state *requestState, name string, template *keyTemplate) uint64 {
	key, empty := template.hash(&state.resolution, state.repl)
	if empty != "" {
		h.warnEmptyKey(name, empty)
	}
	return key
}

func (h *Handler) increment(state *requestState, limit *Limit) int64 {
	n, ok := limit.cost.of(state.repl)
	if !ok {
		h.warnCost(limit)
	}
	return limit.gcra.increment(n)
}

func (h *Handler) exemptsUnresolved(state *requestState) bool {
	return !state.resolved() && h.unresolved == unresolvedExempt
}

// observes says whether a budget is only counted.
func (h *Handler) observes(b budget) bool { return h.observe || b.observed() }

func (s *requestState) exempt(b budget) {
	s.judge(b.counters())
	b.counters().add(outcomeExempt)
}

func (c *charge) giveBack(now int64) {
	if !c.skip && !c.free {
		c.budget.giveBack(c.key, c.increment, c.mark, now)
	}
}

// giveBackShared undoes the charge in the fleet's store.
func (c *charge) giveBackShared() {
	if c.shared != nil {
		c.shared.giveBack()
	}
}

// refuse counts and describes a denial.
func (h *Handler) refuse(c *charge, wait time.Duration, now int64) denial {
	c.budget.counters().add(outcomeDenied)
	d := c.budget.deny(c.key, wait, now)
	c.budget.denials().note(h.logger, d, c.key, now, false)
	if limit, ok := c.budget.(*Limit); ok && h.headers != headersOff {
		d.quota = limit.quota(h.headers, c.key, now)
	}
	return d
}

// wouldRefuse counts what a denial would have been, and lets it have its effects
// on the budget's own state, so that a trial run counts what a real one would.
func (h *Handler) wouldRefuse(c *charge, wait time.Duration, now int64) {
	c.budget.counters().add(outcomeWouldDeny)
	d := c.budget.deny(c.key, wait, now)
	c.budget.denials().note(h.logger, d, c.key, now, true)
}
