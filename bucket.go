package edgelimit

import (
	"math"
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
	emissionInterval int64 // nanoseconds that a request of cost 1 takes
	tolerance        int64 // nanoseconds a TAT may lie ahead of the clock
}

func newGCRA(r rate, burst int64) (gcra, error) {
	tolerance, err := r.tolerance(burst)
	return gcra{emissionInterval: int64(r.emissionInterval()), tolerance: int64(tolerance)}, err
}

// increment is what a request of that cost adds to a TAT. A cost above the burst
// gives more than the tolerance, and so never passes.
func (g gcra) increment(cost float64) int64 {
	increment := math.Ceil(cost * float64(g.emissionInterval))
	if increment > float64(g.tolerance) {
		return math.MaxInt64
	}
	return max(1, int64(increment))
}

// peek says whether a request of key would pass now, and how long it would have
// to wait if not: 0 if it never can. It changes nothing.
func (g gcra) peek(buckets *table.Table, key uint64, increment, now int64) (wait time.Duration, ok bool) {
	if increment > g.tolerance {
		return 0, false
	}
	wait = g.wait(buckets.Peek(key, now), increment, now)
	return max(wait, 0), wait <= 0
}

// take charges one request to key and returns its TAT, or says how long it must
// wait.
func (g gcra) take(buckets *table.Table, key uint64, increment, now int64) (tat int64, wait time.Duration, ok bool) {
	if increment > g.tolerance {
		return 0, 0, false
	}
	tat, ok = buckets.Add(key, now, increment, g.tolerance)
	if ok {
		return tat, 0, true
	}
	return tat, g.wait(tat, increment, now), false
}

// giveBack undoes a take that set the key's TAT to own. What has decayed since
// stays so, lest give-backs add up to more than was taken; what was forgotten
// too.
func (g gcra) giveBack(buckets *table.Table, key uint64, increment, own, now int64) {
	if amount := min(increment, own-now); amount > 0 {
		buckets.Refund(key, now, amount)
	}
}

// wait is the time until a request with this TAT conforms.
func (g gcra) wait(tat, increment, now int64) time.Duration {
	return time.Duration(max(tat, now) - now + increment - g.tolerance)
}

// remaining is how many requests a key with this TAT could still make now.
func (g gcra) remaining(tat, now int64) int64 {
	return max(0, (g.tolerance-max(tat-now, 0))/g.emissionInterval)
}

// rescaled is the TAT under these numbers of a key that had its TAT under other
// ones: the share of the budget that was used stays.
func (g gcra) rescaled(tat int64, before gcra, now int64) int64 {
	debt := float64(tat-now) / float64(before.tolerance) * float64(g.tolerance)
	if debt <= 0 {
		return tat
	}
	return now + int64(min(math.Ceil(debt), float64(g.tolerance)))
}

// A ban is kept as a debt of its own beside the key's, in the same table and as
// good as always in the same cache line: keys are even, their bans odd.

func banKey(key uint64) uint64 { return key | 1 }

func isBan(key uint64) bool { return key&1 == 1 }
