package edgelimit

import (
	"math"
	"slices"
	"sync"
	"time"
)

// slidingCount counts admissions in any window of time, strictly and in
// constant memory, whatever the count. Make it with newSlidingCount. It is safe
// for concurrent use.
type slidingCount struct {
	mu   sync.Mutex
	rate rate
	past admissions
	last int64 // the newest clock reading

	// What was used above the count when that was changed: another change would
	// give it back.
	excess      int64
	excessUntil int64
}

// admissions remembers what was admitted. Its callers' clock never goes back.
type admissions interface {
	// used is how many count in a window that ends now.
	used(now int64) int64

	// admit counts n more, and returns what undo needs to take one of them back.
	admit(now, n int64) (mark int64)
	undo(mark int64)

	// wait is the time until one of those that are used no longer counts.
	wait(now int64) time.Duration
}

func newSlidingCount(r rate) *slidingCount {
	return &slidingCount{rate: r, past: newAdmissions(r)}
}

// newAdmissions remembers each admission while these are few, where slots would
// waste too much of the count, and slots of time otherwise.
func newAdmissions(r rate) admissions {
	if r.count <= exactCount {
		return &exactAdmissions{window: int64(r.window), times: make([]int64, 0, r.count)}
	}
	return &slottedAdmissions{width: (int64(r.window) + windowSlots - 1) / windowSlots}
}

// read is the clock for the admissions: two callers may arrive in the other
// order than they read it, and then the later reading stands for both.
func (s *slidingCount) read(now int64) int64 {
	s.last = max(s.last, now)
	return s.last
}

// peek says whether a request would pass now and, if not, how long it takes
// until one can.
func (s *slidingCount) peek(now int64) (wait time.Duration, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now = s.read(now)
	if s.past.used(now) < s.rate.count {
		return 0, true
	}
	return s.past.wait(now), false
}

// take admits one request. The mark is what giveBack wants.
func (s *slidingCount) take(now int64) (mark int64, wait time.Duration, ok bool) {
	return s.takeOf(math.MaxInt64, now)
}

// takeOf is take with no more than a share of the count.
func (s *slidingCount) takeOf(share, now int64) (mark int64, wait time.Duration, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now = s.read(now)
	if s.past.used(now) >= min(share, s.rate.count) {
		return 0, s.past.wait(now), false
	}
	return s.past.admit(now, 1), 0, true
}

// note counts a request that something else has admitted.
func (s *slidingCount) note(now int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.past.admit(s.read(now), 1)
}

// giveBack undoes a take, for a request that was denied by something else in
// the same moment.
func (s *slidingCount) giveBack(mark int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.past.undo(mark)
}

// adopt goes on with other numbers. What was used stays used, as if it had been
// used just now: the promise holds for the new window from the first moment.
func (s *slidingCount) adopt(r rate, now int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rate == r {
		return
	}
	now = s.read(now)
	used := s.past.used(now)
	if now < s.excessUntil {
		used += s.excess
	}
	s.rate, s.past = r, newAdmissions(r)
	s.past.admit(now, min(used, r.count))
	s.excess, s.excessUntil = max(0, used-r.count), now+int64(r.window)
}

// usedRatio is how much of the count a window that ends now has used.
func (s *slidingCount) usedRatio(now int64) float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return float64(s.past.used(s.read(now))) / float64(s.rate.count)
}

// exactCount is up to which count each admission is remembered.
const exactCount = 64

// exactAdmissions are the times of the last admissions, oldest first.
type exactAdmissions struct {
	window int64
	times  []int64
}

func (e *exactAdmissions) used(now int64) int64 {
	gone := 0
	for gone < len(e.times) && e.times[gone] <= now-e.window {
		gone++
	}
	e.times = slices.Delete(e.times, 0, gone)
	return int64(len(e.times))
}

func (e *exactAdmissions) admit(now, n int64) (mark int64) {
	for range n {
		e.times = append(e.times, now)
	}
	return now
}

func (e *exactAdmissions) undo(mark int64) {
	if n := slices.Index(e.times, mark); n >= 0 {
		e.times = slices.Delete(e.times, n, n+1)
	}
}

func (e *exactAdmissions) wait(now int64) time.Duration {
	return time.Duration(e.times[0] + e.window - now)
}

// windowSlots is into how many slots a window is cut. A window of time touches
// at most one slot more than that, so slots that together admit no more than
// the count hold the promise for every window; one in windowSlots+1 is the share
// of a steady load that this costs.
const windowSlots = 64

// slottedAdmissions counts admissions by slots of time.
type slottedAdmissions struct {
	width   int64                  // nanoseconds
	slots   [windowSlots + 1]int64 // by slot number modulo the length
	current int64                  // number of the newest slot
	sum     int64
}

func (s *slottedAdmissions) slot(number int64) *int64 { return &s.slots[number%int64(len(s.slots))] }

func (s *slottedAdmissions) used(now int64) int64 {
	newest := now / s.width
	if newest-s.current > windowSlots {
		s.slots, s.sum = [windowSlots + 1]int64{}, 0
	} else {
		for number := s.current + 1; number <= newest; number++ {
			s.sum -= *s.slot(number)
			*s.slot(number) = 0
		}
	}
	s.current = newest
	return s.sum
}

func (s *slottedAdmissions) admit(now, n int64) (mark int64) {
	s.used(now)
	*s.slot(s.current) += n
	s.sum += n
	return s.current
}

func (s *slottedAdmissions) undo(mark int64) {
	if s.current-mark <= windowSlots && *s.slot(mark) > 0 {
		*s.slot(mark)--
		s.sum--
	}
}

func (s *slottedAdmissions) wait(now int64) time.Duration {
	oldest := max(0, s.current-windowSlots)
	for *s.slot(oldest) == 0 {
		oldest++ // ends at the newest at last: something is used
	}
	return time.Duration((oldest+windowSlots+1)*s.width - now)
}
