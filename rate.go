package edgelimit

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// Bounds of a rate. They keep every time that the arithmetic can reach within
// an int64 of nanoseconds, and the emission interval so long that rounding it to
// whole nanoseconds changes the rate by no more than a hundredth.
const (
	maxWindow          = 10 * 365 * 24 * time.Hour
	minWindow          = time.Millisecond
	maxPerSecond       = 1_000_000_000
	maxToleranceInTime = 100 * 365 * 24 * time.Hour
)

// rate is a count of requests in a window of time.
type rate struct {
	count  int64
	window time.Duration
}

// parseRate reads "<count>/<window>": 10/m, 100/s, 5000/h, 20/10s, 1/1d. The
// count is a whole number of at least 1. The window is a unit or a duration as
// Caddy writes it, from 1ms to 3650d.
func parseRate(s string) (rate, error) {
	countText, windowText, ok := strings.Cut(s, "/")
	if !ok {
		return rate{}, fmt.Errorf("rate %q is not <count>/<window>: write for example 10/m, 100/s or 20/10s", s)
	}
	count, err := strconv.ParseInt(countText, 10, 64)
	if errors.Is(err, strconv.ErrRange) && count > 0 {
		return rate{}, fmt.Errorf("rate %q: the count %q is too large", s, countText)
	}
	if err != nil || count < 1 {
		return rate{}, fmt.Errorf("rate %q: the count %q must be a whole number of at least 1", s, countText)
	}
	window, err := parseWindow(windowText)
	if err != nil {
		return rate{}, fmt.Errorf("rate %q: %w", s, err)
	}
	r := rate{count: count, window: window}
	if float64(count)/window.Seconds() > maxPerSecond {
		return rate{}, fmt.Errorf("rate %q is more than %d a second, which limits nothing", s, maxPerSecond)
	}
	if kept := float64(window) / float64(r.emissionInterval()); kept < 0.99*float64(count) {
		return rate{}, fmt.Errorf("rate %q: at less than 100ns a request the clock's nanoseconds cannot keep it to within 1 %%: "+
			"choose a count that divides the window's nanoseconds", s)
	}
	return r, nil
}

func parseWindow(s string) (time.Duration, error) {
	text := s
	switch s {
	case "ms", "s", "m", "h", "d":
		text = "1" + s
	}
	window, err := caddy.ParseDuration(text)
	if err != nil || text[0] < '0' || text[0] > '9' {
		return 0, fmt.Errorf("the window %q is no duration from 1ms to 3650d: write for example s, m, h, d, 10s or 90m", s)
	}
	if window < minWindow || window > maxWindow {
		return 0, fmt.Errorf("the window %q must be from 1ms to 3650d", s)
	}
	return window, nil
}

// emissionInterval is the time after which one more request becomes possible:
// the T of GCRA. It is rounded up, so that rounding never admits more than the
// rate says.
func (r rate) emissionInterval() time.Duration {
	return time.Duration((int64(r.window) + r.count - 1) / r.count)
}

// tolerance is how far a key's TAT may lie ahead of the clock: burst emission
// intervals.
func (r rate) tolerance(burst int64) (time.Duration, error) {
	interval := int64(r.emissionInterval())
	if burst < 1 {
		return 0, errors.New("burst must be at least 1")
	}
	if burst > math.MaxInt64/interval || time.Duration(interval*burst) > maxToleranceInTime {
		return 0, fmt.Errorf("burst %d is too large: refilling it would take more than 100 years", burst)
	}
	return time.Duration(interval * burst), nil
}

// String gives the rate in one form, whatever it was written as, so that 10/m
// and 10/60s are one definition.
func (r rate) String() string {
	return strconv.FormatInt(r.count, 10) + "/" + r.window.String()
}
