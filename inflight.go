package edgelimit

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// InFlight bounds how many requests are being answered at the same time: of
// everybody, or of each key. A WebSocket counts as long as it is open.
type InFlight struct {
	// The name, unique in the whole configuration: `[a-z0-9_]+`. The same full
	// definition in two sites is one budget.
	Name string `json:"name,omitempty"`

	// How many requests at the same time.
	Max int64 `json:"max,omitempty"`

	// What tells one budget from another, as in a limit. Default: one budget for
	// everybody.
	Key []string `json:"key,omitempty"`

	// Which requests count. Default: all that the handler's matcher selects.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	// The status of a denial. Default: 503, with a key 429.
	Status int `json:"status,omitempty"`

	// Count and log, but never deny. Default: false.
	Observe bool `json:"observe,omitempty"`

	key      []keyPart // nil: one budget for everybody
	match    string    // MatcherSetsRaw as text: loading modules clears it
	defined  string    // what makes two of one name the same budget
	refusal  refusal
	template keyTemplate
	matchers caddyhttp.MatcherSets
	maxKeys  int
	state    *inFlightState
}

func (f *InFlight) validate() (err error) {
	if err := validateName(f.Name); err != nil {
		return err
	}
	if f.Max < 1 {
		return errors.New("the number of requests at the same time must be at least 1")
	}
	if len(f.Key) > 0 {
		if f.key, err = parseKey(f.Key); err != nil {
			return err
		}
	}
	if err := validateStatus(f.Status); err != nil {
		return err
	}
	f.match = rawMatch(f.MatcherSetsRaw)
	f.defined = f.definition()
	f.refusal = refusal{&exceededError{"in_flight", f.Name}, reducedCapacity(f.status())}
	if f.keyed() {
		f.refusal.problem = quotaExceeded(f.Name, f.status())
	}
	return nil
}

func (f *InFlight) provision(ctx caddy.Context, app *App) (err error) {
	if err = f.validate(); err != nil {
		return fmt.Errorf("in_flight %s: %w", f.Name, err)
	}
	f.maxKeys = app.MaxKeys
	f.template.parts = f.key
	f.template.ipv4Bits = cmp.Or(app.IPv4Prefix, defaultIPv4Prefix)
	f.template.ipv6Bits = cmp.Or(app.IPv6Prefix, defaultIPv6Prefix)
	f.template.secret.Store(newKeySecret(app.pepper, f.Name))
	if f.matchers, err = loadMatchers(ctx, f); err != nil {
		return fmt.Errorf("in_flight %s: %w", f.Name, err)
	}
	return nil
}

// definition writes it with all defaults filled in.
func (f *InFlight) definition() string {
	text, _ := json.Marshal(struct {
		*InFlight
		Status int `json:"status"`
	}{f, f.status()})
	return "in_flight " + string(text)
}

func (f *InFlight) keyed() bool { return f.key != nil }

func (f *InFlight) status() int {
	switch {
	case f.Status != 0:
		return f.Status
	case f.keyed():
		return http.StatusTooManyRequests
	}
	return http.StatusServiceUnavailable
}

// InFlight is a budget.
func (f *InFlight) name() string        { return f.Name }
func (f *InFlight) counters() *counters { return &f.state.counters }
func (f *InFlight) denials() *denialLog { return &f.state.denials }
func (f *InFlight) observed() bool      { return f.Observe }

func (f *InFlight) peek(key uint64, most, _ int64) (time.Duration, bool) {
	return 0, f.state.running.peek(key, most, f.maxKeys)
}

func (f *InFlight) take(key uint64, most, _ int64) (mark int64, wait time.Duration, ok bool) {
	return 0, 0, f.state.running.enter(key, most, f.maxKeys)
}

func (f *InFlight) giveBack(key uint64, _, _, _ int64) { f.state.running.leave(key) }

// deny tells no time to wait: nobody knows when the others are done.
func (f *InFlight) deny(uint64, time.Duration, int64) denial {
	return denial{name: f.Name, status: f.status(), refusal: &f.refusal}
}

// running counts requests in flight by key. It holds only keys that have some,
// and no more than it is told. The zero value is empty. It is safe for
// concurrent use.
type running struct {
	mu    sync.Mutex
	count map[uint64]int64
	total int64
}

// peek says whether one more request of key may run.
func (f *running) peek(key uint64, most int64, maxKeys int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.room(key, most, maxKeys)
}

// enter counts one more request of key, unless there are too many. A table that
// is full of other keys denies: it cannot forget who is still there.
func (f *running) enter(key uint64, most int64, maxKeys int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.room(key, most, maxKeys) {
		return false
	}
	if f.count == nil {
		f.count = make(map[uint64]int64)
	}
	f.count[key]++
	f.total++
	return true
}

func (f *running) room(key uint64, most int64, maxKeys int) bool {
	n, known := f.count[key]
	return n < most && (known || len(f.count) < maxKeys)
}

// leave undoes enter.
func (f *running) leave(key uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.total--
	if f.count[key]--; f.count[key] <= 0 {
		delete(f.count, key)
	}
}

// inFlight is how many requests run, of all keys.
func (f *running) inFlight() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.total
}
