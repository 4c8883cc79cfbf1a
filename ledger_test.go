package edgelimit

import (
	"math"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// halfMoved is a limit of 10/h that has become one of 10/d at the hour, with no
// debt moved yet: one key has used five of ten, and one is banned for 42 minutes.
func halfMoved(t *testing.T) (state *limitState, old, now *Limit, debtor, banned uint64) {
	t.Helper()
	debtor, banned = 1<<60, 1<<41
	from, to := numbersOf(t, "10/h", 0, 1000), numbersOf(t, "10/d", 0, 1000)
	state = newLimitState(from)
	limitOf := func(numbers limitNumbers) *Limit {
		return &Limit{app: new(App), state: state, gcra: numbers.gcra, numbers: numbers, Ban: caddy.Duration(time.Hour)}
	}
	old, now = limitOf(from), limitOf(to)
	old.take(debtor, 5*from.emissionInterval, hour)
	state.ledger.Load().Set(banKey(banned), hour, hour+int64(42*time.Minute))
	expect(t, state.open(to, hour), true, "a ledger is opened")
	return state, old, now, debtor, banned
}

const hour = int64(time.Hour)

// owes is what a key owes in the ledger that is open, from a moment on.
func (s *limitState) owes(key uint64, now int64) time.Duration {
	return time.Duration(s.ledger.Load().Peek(key, now) - now).Round(time.Second)
}

// What has not moved is counted, listed, and written into snapshots all the same.
func TestLedgerOfTwoTables(t *testing.T) {
	state, _, _, debtor, banned := halfMoved(t)
	debts := state.ledger.Load()
	expect(t, debts.Len(), 2, "keys")
	seen := make(map[uint64]time.Duration)
	for key, tat := range debts.All() {
		seen[key] = time.Duration(tat - hour).Round(time.Second)
	}
	expect(t, len(seen), 2, "keys in the list")
	expect(t, seen[debtor], 12*time.Hour, "five of ten a day")
	expect(t, seen[banKey(banned)], 42*time.Minute, "a ban keeps its end")
	expect(t, state.open(numbersOf(t, "5/m", 0, 1000), hour), false, "a third ledger before the second has all is opened")
}

// Who asks for a key moves all that belongs to it, measured at the moment in which
// the ledger was opened, and once.
func TestAskingMoves(t *testing.T) {
	state, _, limit, debtor, banned := halfMoved(t)
	wait, ok := limit.peekOwn(banned, limit.gcra.emissionInterval, hour)
	expect(t, ok, false, "who is banned passes")
	expect(t, wait, 42*time.Minute, "his ban")

	halfAnHourLater := hour + int64(30*time.Minute)
	debts := state.of(debtor, halfAnHourLater)
	expect(t, state.owes(debtor, hour), 12*time.Hour, "debt since the opening")
	debts.giveBack(debts.Table, debtor, debts.emissionInterval, debts.Peek(debtor, halfAnHourLater), halfAnHourLater)
	state.of(debtor, halfAnHourLater)
	state.gather(halfAnHourLater)
	expect(t, state.owes(debtor, hour), 12*time.Hour-144*time.Minute, "what was given back comes again")
}

// A debt that is on its way while the rest has arrived is waited for: until then
// nobody may think that all have moved.
func TestGatherWaitsForWhatMoves(t *testing.T) {
	state, _, _, debtor, _ := halfMoved(t)
	debts := state.ledger.Load()
	moving := &debts.moving[debtor>>58]
	moving.Lock()
	tat, _ := debts.before.Load().Delete(debtor)
	gathered := make(chan struct{})
	go func() {
		state.gather(hour)
		close(gathered)
	}()
	select {
	case <-gathered:
		t.Error("gather has ended")
	case <-time.After(100 * time.Millisecond):
	}
	debts.Move(debtor, hour, tat)
	moving.Unlock()
	<-gathered
	expect(t, debts.before.Load() == nil, true, "all has moved")
}

// Requests of the old configuration, whose numbers are no longer in force, count
// in those that are.
func TestRequestsOfOldNumbers(t *testing.T) {
	state, old, _, key, _ := halfMoved(t)
	increment := old.gcra.emissionInterval
	if _, ok := old.peekOwn(key, 6*increment, hour); ok {
		t.Error("six more of ten pass where five are used")
	}
	mark, _, ok := old.take(key, 2*increment, hour)
	expect(t, ok, true, "two more pass")
	expect(t, state.owes(key, hour), 7*144*time.Minute, "seven of ten a day")
	old.giveBack(key, 2*increment, mark, hour)
	expect(t, state.owes(key, hour), 5*144*time.Minute, "two are given back")
	old.OnStatus = &OnStatus{Late: true}
	old.OnStatus.charged[401] = true
	old.settle(charge{key: key, increment: increment}, 401, false, hour)
	expect(t, state.owes(key, hour), 6*144*time.Minute, "one is charged late")
	old.learn(key, &StoreCharge{Debt: 48 * time.Minute}, hour, false)
	expect(t, state.owes(key, hour), 8*144*time.Minute, "the store knows of eight")
}

// A charge whose answer comes later is given back whole, also where it was made
// by old numbers when new ones were in force already.
func TestPendingChargesOverTwoLedgers(t *testing.T) {
	const key = uint64(1 << 40)
	from, to := numbersOf(t, "5/h", 0, 1000), numbersOf(t, "5/d", 0, 1000)
	state := newLimitState(from)
	before := state.ledger.Load()
	first, _, _ := state.pending.take(from.gcra, before, key, from.emissionInterval, hour)
	state.open(to, hour)
	second, _, _ := state.pending.take(from.gcra, before, key, from.emissionInterval, hour)
	sixMinutesLater := hour + int64(6*time.Minute)
	for _, id := range []int64{first, second} {
		state.pending.end(state.of(key, sixMinutesLater), key, id, true, sixMinutesLater)
	}
	expect(t, max(0, state.owes(key, sixMinutesLater)), 0, "what is owed afterwards")
}

// The same over a third ledger.
func TestPendingChargesOverThreeLedgers(t *testing.T) {
	const key = uint64(1 << 40)
	from := numbersOf(t, "5/h", 0, 1000)
	state := newLimitState(from)
	id, _, _ := state.pending.take(from.gcra, state.ledger.Load(), key, from.emissionInterval, hour)
	state.adoptAll(numbersOf(t, "5/d", 0, 1000), hour)
	sixMinutesLater := hour + int64(6*time.Minute)
	state.adoptAll(numbersOf(t, "50/h", 0, 1000), sixMinutesLater)
	expect(t, state.owes(key, sixMinutesLater) > 11*time.Minute, true, "a fifth of the budget is owed, but for what decayed")
	state.pending.end(state.ledger.Load(), key, id, true, sixMinutesLater)
	expect(t, max(0, state.owes(key, sixMinutesLater)), 0, "what is owed afterwards")
}

// Who settles with the ledger before, while charges have followed into the next
// one already, loses what he gives back, and nobody else does.
func TestPendingChargeThatIsLate(t *testing.T) {
	const key, now = uint64(1 << 40), 1000 * hour
	from, to := numbersOf(t, "5/h", 0, 1000), numbersOf(t, "5/d", 0, 1000)
	state := newLimitState(from)
	before := state.ledger.Load()
	late, _, _ := state.pending.take(from.gcra, before, key, from.emissionInterval, now)
	other, _, _ := state.pending.take(from.gcra, before, key, from.emissionInterval, now)
	state.open(to, now)
	state.of(key, now)
	state.pending.end(before, key, late, true, now)
	state.pending.end(state.ledger.Load(), key, other, true, now)
	expect(t, state.owes(key, now), time.Duration(to.emissionInterval), "one charge is owed")
}

// While one request opens a ledger the others go on with the one that is open.
func TestOneOpens(t *testing.T) {
	state := newLimitState(numbersOf(t, "5/h", 0, 1000))
	state.opening.Lock()
	opened := make(chan bool, 1)
	go func() { opened <- state.open(numbersOf(t, "5/d", 0, 1000), hour) }()
	select {
	case ok := <-opened:
		expect(t, ok, false, "a second one is opened")
	case <-time.After(10 * time.Second):
		t.Error("a request waits for another one")
	}
	state.opening.Unlock()
}

// What is forgotten is counted over any number of ledgers, and never less.
func TestForgottenOverLedgers(t *testing.T) {
	numbers := []limitNumbers{numbersOf(t, "1/h", 0, 8), numbersOf(t, "1/d", 0, 8)}
	state := newLimitState(numbers[0])
	fill := func(debts *ledger) {
		for n := range uint64(100) {
			debts.Set((n+1)*0x9e3779b97f4a7c15&^1, hour, 2*hour)
		}
	}
	var last uint64
	forgets := func(what string, atLeast uint64) {
		t.Helper()
		_, indebted := state.ledger.Load().Forgotten()
		if indebted < last+atLeast {
			t.Errorf("%s: %d are forgotten, and %d were before", what, indebted, last)
		}
		last = indebted
	}
	fill(state.ledger.Load())
	forgets("a full table", 92)
	for n := range 4 {
		before := state.ledger.Load()
		state.open(numbers[(n+1)%2], hour)
		forgets("another ledger", 0)
		fill(before)
		forgets("who was about to charge in the ledger before", 92)
		state.gather(hour)
		forgets("all has moved", 0)
		fill(state.ledger.Load())
		forgets("a full table again", 92)
	}
}

// What was denied by other numbers is asked of the store again.
func TestDenialsEndWithTheirNumbers(t *testing.T) {
	from, to := numbersOf(t, "10/h", 0, 1000), numbersOf(t, "10/m", 0, 1000)
	state := newLimitState(from)
	state.deniedKeys(1000).Set(2, hour, 2*hour)
	state.open(to, hour)
	expect(t, state.deniedKeys(1000).Peek(2, hour), 0, "until when the key is denied")
}

// An increment by other numbers, as it is by these.
func TestConverted(t *testing.T) {
	day, sec := numbersOf(t, "2/d", 0, 1000).gcra, numbersOf(t, "2/s", 0, 1000).gcra
	hundred, ten := numbersOf(t, "100/h", 0, 1000).gcra, numbersOf(t, "10/h", 0, 1000).gcra
	for _, row := range []struct {
		why       string
		increment int64
		from, to  gcra
		want      int64
	}{
		{"the same numbers", 7, day, day, 7},
		{"one request", day.emissionInterval, day, sec, sec.emissionInterval},
		{"never nothing", 1, day, sec, 1},
		{"a share of a burst that is smaller stays that", 3 * day.emissionInterval, day, sec, 3 * sec.emissionInterval},
		{"a cost above the new burst never passes", 50 * hundred.emissionInterval, hundred, ten, math.MaxInt64},
		{"a cost that never passed does not now", math.MaxInt64, hundred, ten, math.MaxInt64},
		{"a share that is beyond all time", int64(maxToleranceInTime), sec, day, math.MaxInt64},
	} {
		expect(t, row.to.converted(row.increment, row.from), row.want, row.why)
	}
}

// With a store a share may be above the burst, but what never passes does not pass
// for that.
func TestCostAboveANewBurstOfAFleet(t *testing.T) {
	old, limit := numbersOf(t, "100/h", 0, 1000), numbersOf(t, "10/h", 0, 1000)
	state := newLimitState(limit)
	l := &Limit{app: &App{fleet: new(fleet)}, state: state, gcra: old.gcra, numbers: old}
	for _, onStatus := range []*OnStatus{nil, {}} {
		l.OnStatus = onStatus
		_, _, ok := l.take(2, 50*old.emissionInterval, hour)
		expect(t, ok, false, "it passes")
		expect(t, state.ledger.Load().Peek(2, hour), 0, "TAT")
	}
}
