package edgelimit

import (
	"net/http"
	"time"
)

// denial says what denied a request, and for how long. The zero value denies
// nothing.
type denial struct {
	name   string
	status int
	wait   time.Duration // 0: waiting does not help
	err    error         // what error routes get, made once at load
}

// charge is one budget that a request counts against. A limit has a key; a
// ceiling has none.
type charge struct {
	limit   *Limit
	ceiling *Ceiling
	key     uint64
	slot    int64
	skip    bool // observed, and would deny: not charged
}

// decide judges the request against all that applies to it: limits first,
// ceilings last. It is all or nothing: a request that anything denies consumes
// nothing anywhere. Each name is charged once a request, however often handlers
// run.
func (h *Handler) decide(r *http.Request, state *requestState, now int64) (denial, error) {
	if len(h.limits) == 0 && len(h.ceilings) == 0 && h.unresolved == unresolvedShare {
		return denial{}, nil
	}
	if selected, err := h.matchers.AnyMatchWithError(r); err != nil || !selected {
		return denial{}, err
	}
	if !state.resolved() && h.unresolved == unresolvedDeny && !h.observe {
		return denial{name: unresolvedName, status: http.StatusForbidden, err: errUnresolved}, nil
	}

	var space [8]charge
	charges, err := h.applicable(r, state, space[:0])
	if err != nil || len(charges) == 0 {
		return denial{}, err
	}
	for i := range charges {
		state.judge(charges[i].counters())
	}
	// Ask all before charging any. With a single one, charging asks.
	if len(charges) > 1 {
		for i := range charges {
			if wait, ok := charges[i].peek(now); !ok {
				if !h.observes(&charges[i]) {
					return charges[i].deny(wait), nil
				}
				charges[i].skip = true
			}
		}
	}
	for i := range charges {
		c := &charges[i]
		if c.skip {
			c.counters().add(outcomeWouldDeny)
			continue
		}
		if wait, ok := c.take(now); !ok {
			// Another request was faster between asking and charging.
			if !h.observes(c) {
				h.giveBack(charges[:i], now)
				return c.deny(wait), nil
			}
			c.skip = true
			c.counters().add(outcomeWouldDeny)
		}
	}
	for i := range charges {
		if !charges[i].skip {
			charges[i].counters().add(outcomeAllowed)
		}
	}
	return denial{}, nil
}

// applicable lists what the request counts against, with its keys.
func (h *Handler) applicable(r *http.Request, state *requestState, charges []charge) ([]charge, error) {
	for _, limit := range h.limits {
		if state.judged(&limit.state.counters) {
			continue
		}
		if matches, err := limit.matchers.AnyMatchWithError(r); err != nil {
			return nil, err
		} else if !matches {
			continue
		}
		if limit.exempts(r, &state.resolution) || !state.resolved() && h.unresolved == unresolvedExempt {
			state.judge(&limit.state.counters)
			limit.state.add(outcomeExempt)
			continue
		}
		key, empty := limit.template.hash(&state.resolution, state.repl)
		if empty != "" {
			h.warnEmptyKey(limit, empty)
		}
		charges = append(charges, charge{limit: limit, key: key})
	}
	for _, ceiling := range h.ceilings {
		if state.judged(&ceiling.state.counters) {
			continue
		}
		matches, err := ceiling.matchers.AnyMatchWithError(r)
		if err != nil {
			return nil, err
		}
		if matches {
			charges = append(charges, charge{ceiling: ceiling})
		}
	}
	return charges, nil
}

// observes says whether a charge is only counted.
func (h *Handler) observes(c *charge) bool {
	if c.limit != nil {
		return h.observe || c.limit.Observe
	}
	return h.observe || c.ceiling.Observe
}

func (h *Handler) giveBack(charges []charge, now int64) {
	for i := range charges {
		if c := &charges[i]; c.skip {
			continue
		} else if c.limit != nil {
			c.limit.gcra.giveBack(c.limit.state.buckets, c.key, now)
		} else {
			c.ceiling.state.window.giveBack(c.slot)
		}
	}
}

func (c *charge) counters() *counters {
	if c.limit != nil {
		return &c.limit.state.counters
	}
	return &c.ceiling.state.counters
}

func (c *charge) peek(now int64) (time.Duration, bool) {
	if c.limit != nil {
		return c.limit.gcra.peek(c.limit.state.buckets, c.key, now)
	}
	return c.ceiling.state.window.peek(now)
}

func (c *charge) take(now int64) (wait time.Duration, ok bool) {
	if c.limit != nil {
		return c.limit.gcra.take(c.limit.state.buckets, c.key, now)
	}
	c.slot, wait, ok = c.ceiling.state.window.take(now)
	return wait, ok
}

func (c *charge) deny(wait time.Duration) denial {
	c.counters().add(outcomeDenied)
	if c.limit != nil {
		return denial{c.limit.Name, c.limit.status(), wait, c.limit.exceeded}
	}
	return denial{c.ceiling.Name, c.ceiling.status(), wait, c.ceiling.exceeded}
}
