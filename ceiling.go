package edgelimit

import (
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Ceiling is a budget that nothing in a request can influence: it has no key.
// In any window of its length, wherever that starts, no more than its count of
// requests pass. It counts what it admits, not what it denies; on this instance
// alone, unless instances share a store.
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
	c.refusal = refusal{&exceededError{"ceiling", c.Name}, reducedCapacity(c.status())}
	return nil
}

func (c *Ceiling) provision(ctx caddy.Context, app *App) (err error) {
	c.app = app
	if err = c.validate(); err != nil {
		return fmt.Errorf("ceiling %s: %w", c.Name, err)
	}
	if err = c.requireShareable(); err != nil {
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
	if c.app.fleet != nil {
		return c.state.lease.peek(now)
	}
	return c.state.window.peek(now)
}

// take admits the request. mark is the slot that giveBack wants.
func (c *Ceiling) take(_ uint64, _, now int64) (mark int64, wait time.Duration, ok bool) {
	c.adopt(now)
	if c.app.fleet != nil {
		return c.takeLeased(now)
	}
	return c.state.window.take(now)
}

func (c *Ceiling) giveBack(_ uint64, _, mark, now int64) {
	if c.app.fleet != nil {
		c.state.lease.giveBack(mark, now)
		return
	}
	c.state.window.giveBack(mark)
}

func (c *Ceiling) deny(_ uint64, wait time.Duration, _ int64) denial {
	return denial{name: c.Name, status: c.status(), wait: wait, refusal: &c.refusal}
}
