package edgelimit

import (
	"time"

	"github.com/edgelimit/caddy-edgelimit/internal/table"
)

// gcra is the arithmetic of one limit: the generic cell rate algorithm of ATM
// traffic management (ITU-T I.371), which needs one timestamp for each key, the
// theoretical arrival time (TAT) of the next request if all came evenly. What
// the TAT lies ahead of the clock is the key's debt.
//
// A key passes burst requests at once and the rate over time, so in a first
// window up to burst plus count: with the default burst, twice the count.
type gcra struct {
	emissionInterval int64 // nanoseconds that one request costs
	tolerance        int64 // nanoseconds a TAT may lie ahead of the clock
}

func newGCRA(r rate, burst int64) (gcra, error) {
	tolerance, err := r.tolerance(burst)
	return gcra{emissionInterval: int64(r.emissionInterval()), tolerance: int64(tolerance)}, err
}

// peek says whether a request of key would pass now, and how long it would have
// to wait if not. It changes nothing.
func (g gcra) peek(buckets *table.Table, key uint64, now int64) (wait time.Duration, ok bool) {
	wait = g.wait(buckets.Peek(key, now), now)
	return wait, wait <= 0
}

// take charges one request to key, or says how long it must wait.
func (g gcra) take(buckets *table.Table, key uint64, now int64) (wait time.Duration, ok bool) {
	tat, ok := buckets.Add(key, now, g.emissionInterval, g.tolerance)
	if ok {
		return 0, true
	}
	return g.wait(tat, now), false
}

// giveBack undoes a take. What has decayed or was forgotten in between stays so.
func (g gcra) giveBack(buckets *table.Table, key uint64, now int64) {
	buckets.Refund(key, now, g.emissionInterval)
}

// wait is the time until a request with this TAT conforms.
func (g gcra) wait(tat, now int64) time.Duration {
	return time.Duration(max(tat, now) + g.emissionInterval - g.tolerance - now)
}
