package edgelimit

import (
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Ceiling is a budget that nothing in a request can influence: it has no key.
// In any window of its length, wherever that starts, no more than its count of
// requests pass. It counts what it admits, not what it denies, and it counts on
// this instance alone.
type Ceiling struct {
	// The name, unique in the whole configuration: `[a-z0-9_]+`. The same full
	// definition in two sites is one budget.
	Name string `json:"name,omitempty"`

	// How many requests pass in any window: `<count>/<window>`, for example
	// `100/s` or `5000/h`.
	Rate string `json:"rate,omitempty"`

	// Which requests count against the ceiling. Default: all that the handler's
	// matcher selects.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	// The status of a denial. Default: 503.
	Status int `json:"status,omitempty"`

	// Count and log, but never deny. Default: false.
	Observe bool `json:"observe,omitempty"`

	rate     rate
	match    string // MatcherSetsRaw as text: loading modules clears it
	defined  string // what makes two ceilings of one name the same budget
	refusal  refusal
	matchers caddyhttp.MatcherSets
	app      *App
	state    *ceilingState
}

func (c *Ceiling) validate() error {
	if err := validateName(c.Name); err != nil {
		return err
	}
	var err error
	if c.rate, err = parseRate(c.Rate); err != nil {
		return err
	}
	if err := validateStatus(c.Status); err != nil {
		return err
	}
	c.match = rawMatch(c.MatcherSetsRaw)
	c.defined = c.definition()
	c.refusal = refusal{&exceededError{"ceiling", c.Name}, statusBody(c.status()), reducedCapacity(c.status())}
	return nil
}

func (c *Ceiling) provision(ctx caddy.Context, app *App) (err error) {
	c.app = app
	if err = c.validate(); err != nil {
		return fmt.Errorf("ceiling %s: %w", c.Name, err)
	}
	if c.matchers, err = loadMatchers(ctx, c); err != nil {
		return fmt.Errorf("ceiling %s: %w", c.Name, err)
	}
	return nil
}

// definition writes the ceiling with all defaults filled in.
func (c *Ceiling) definition() string {
	text, _ := json.Marshal(struct {
		*Ceiling
		Rate   string `json:"rate"`
		Status int    `json:"status"`
	}{c, c.rate.String(), c.status()})
	return "ceiling " + string(text)
}

func (c *Ceiling) status() int {
	if c.Status == 0 {
		return http.StatusServiceUnavailable
	}
	return c.Status
}

// Ceiling is a budget.
func (c *Ceiling) name() string        { return c.Name }
func (c *Ceiling) counters() *counters { return &c.state.counters }
func (c *Ceiling) denials() *denialLog { return &c.state.denials }
func (c *Ceiling) observed() bool      { return c.Observe }

func (c *Ceiling) peek(_ uint64, _, now int64) (time.Duration, bool) {
	c.adopt(now)
	return c.state.window.peek(now)
}

// take admits the request. mark is the slot that giveBack wants.
func (c *Ceiling) take(_ uint64, _, now int64) (mark int64, wait time.Duration, ok bool) {
	c.adopt(now)
	return c.state.window.take(now)
}

func (c *Ceiling) giveBack(_ uint64, _, mark, _ int64) { c.state.window.giveBack(mark) }

func (c *Ceiling) deny(_ uint64, wait time.Duration, _ int64) denial {
	return denial{name: c.Name, status: c.status(), wait: wait, refusal: c.refusal}
}

// ceilingSlots is into how many slots a window is cut. A window of time touches
// at most one slot more than that, so slots that together admit no more than
// the count hold the promise for every window; one slot in ceilingSlots+1 is
// the share of a steady load that this costs.
const ceilingSlots = 64

// slidingCount counts admissions in any window of time, strictly and in
// constant memory. Make it with newSlidingCount. It is safe for concurrent use.
type slidingCount struct {
	mu        sync.Mutex
	rate      rate
	count     int64                   // admissions allowed in any window
	slotWidth int64                   // nanoseconds
	slots     [ceilingSlots + 1]int64 // admissions by slot, indexed by slot number modulo the length
	current   int64                   // number of the newest slot
	used      int64                   // sum of slots
}

func newSlidingCount(r rate) *slidingCount {
	return &slidingCount{rate: r, count: r.count, slotWidth: slotWidth(r)}
}

func slotWidth(r rate) int64 { return (int64(r.window) + ceilingSlots - 1) / ceilingSlots }

// adopt goes on with other numbers. What was used stays used, as if it had been
// used just now: the promise holds for the new window from the first moment.
func (s *slidingCount) adopt(r rate, now int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rate == r {
		return
	}
	s.advance(now)
	used := s.used
	s.rate, s.count, s.slotWidth = r, r.count, slotWidth(r)
	s.slots = [ceilingSlots + 1]int64{}
	s.current = now / s.slotWidth
	s.slots[s.current%int64(len(s.slots))] = used
	s.used = used
}

// advance drops the slots that have left the window. The clock never goes back,
// but two callers may arrive in the other order than they read it: the later
// reading stands.
func (s *slidingCount) advance(now int64) {
	slot := now / s.slotWidth
	if slot <= s.current {
		return
	}
	if slot-s.current > ceilingSlots {
		s.slots = [ceilingSlots + 1]int64{}
		s.used = 0
	} else {
		for n := s.current + 1; n <= slot; n++ {
			s.used -= s.slots[n%int64(len(s.slots))]
			s.slots[n%int64(len(s.slots))] = 0
		}
	}
	s.current = slot
}

// peek says whether a request would pass now and, if not, how long it takes
// until one can.
func (s *slidingCount) peek(now int64) (wait time.Duration, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.advance(now)
	if s.used < s.count {
		return 0, true
	}
	return s.wait(now), false
}

// take admits one request. The slot it was counted in is what giveBack wants.
func (s *slidingCount) take(now int64) (slot int64, wait time.Duration, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.advance(now)
	if s.used >= s.count {
		return 0, s.wait(now), false
	}
	s.slots[s.current%int64(len(s.slots))]++
	s.used++
	return s.current, 0, true
}

// giveBack undoes a take, for a request that was denied by something else in
// the same moment.
func (s *slidingCount) giveBack(slot int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := slot % int64(len(s.slots)); s.current-slot <= ceilingSlots && s.slots[n] > 0 {
		s.slots[n]--
		s.used--
	}
}

// wait is the time until the oldest admission leaves the slots.
func (s *slidingCount) wait(now int64) time.Duration {
	for n := s.current - ceilingSlots; n <= s.current; n++ {
		if n >= 0 && s.slots[n%int64(len(s.slots))] > 0 {
			return time.Duration((n+ceilingSlots+1)*s.slotWidth - now)
		}
	}
	return time.Duration(s.slotWidth) // not reached: a count of at least 1 is used up
}

// usedRatio is how much of the count the newest window has used.
func (s *slidingCount) usedRatio(now int64) float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.advance(now)
	return float64(s.used) / float64(s.count)
}
