package table

import (
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"
)

const (
	second = int64(time.Second)
	year   = 365 * 24 * int64(time.Hour)
)

func TestAdd(t *testing.T) {
	const now = 1000
	for _, row := range []struct {
		name                 string
		tat                  int64 // what the key has, 0 for unknown
		increment, tolerance int64
		want                 int64
		ok                   bool
		why                  string
	}{
		{"unknown key", 0, 10, 50, 1010, true, "a fresh key has its whole burst"},
		{"no debt", 990, 10, 50, 1010, true, "time that passed is not saved up beyond the burst"},
		{"TAT is now", now, 10, 50, 1010, true, "a debt of nothing is none"},
		{"debt", 1020, 10, 50, 1030, true, "requests add up"},
		{"last of the burst", 1040, 10, 50, 1050, true, "the burst is reached, not passed"},
		{"one more", 1050, 10, 50, 1050, false, "denied, and nothing is charged"},
		{"a nanosecond too early", 1041, 10, 50, 1041, false, "the slot is not free yet"},
		{"far in debt", 5000, 10, 50, 5000, false, "a ban, or a burst that was lowered"},
		{"cost above the burst", 0, 60, 50, 0, false, "can never pass, and is not inserted"},
		{"cost above the burst, known", 990, 60, 50, 990, false, "the same, with a key that is there"},
		{"burst of one", 0, 10, 10, 1010, true, "the increment may be all there is"},
		{"no tolerance", 0, 10, 0, 0, false, "nothing passes"},
		{"nothing to charge", 0, 0, 50, now, true, "passes"},
		{"longest", 0, 100 * year, 100 * year, now + 100*year, true, "100 years are in range"},
		{"longest again", now + 100*year, 100 * year, 100 * year, now + 100*year, false, "and do not overflow"},
		{"endless ban", math.MaxInt64, 100 * year, 100 * year, math.MaxInt64, false, "not even this does"},
	} {
		t.Run(row.name, func(t *testing.T) {
			table := New(100)
			if row.tat != 0 {
				table.Set(7, 1, row.tat)
			}
			held := table.Len()
			tat, ok := table.Add(7, now, row.increment, row.tolerance)
			if tat != row.want || ok != row.ok {
				t.Errorf("got %d, %v, want %d, %v: %s", tat, ok, row.want, row.ok, row.why)
			}
			stored := row.want
			if held == 0 && row.want <= now {
				stored = 0
			}
			if got := table.Peek(7, now); got != stored {
				t.Errorf("then Peek says %d, want %d: %s", got, stored, row.why)
			}
			if !ok && table.Len() != held {
				t.Error("a denied key was inserted")
			}
		})
	}
}

func TestAddLateInTheClock(t *testing.T) {
	table := New(1)
	now := 100 * year
	if tat, ok := table.Add(1, now, 100*year, 100*year); tat != 200*year || !ok {
		t.Errorf("got %d, %v", tat, ok)
	}
	if _, ok := table.Add(1, now, 1, 100*year); ok {
		t.Error("passed beyond the tolerance")
	}
}

func TestRefund(t *testing.T) {
	const now = 1000
	for _, row := range []struct {
		name              string
		tat, amount, want int64
		why               string
	}{
		{"part", 1050, 20, 1030, "what was charged is given back"},
		{"all", 1050, 50, now, "the debt is gone"},
		{"more than is owed", 1050, 80, now, "part of it has decayed already: nobody gets credit"},
		{"no debt", 990, 80, 990, "all of it has decayed"},
		{"unknown", 0, 80, 0, "the debt went with the key"},
		{"nothing", 1050, 0, 1050, "nothing was charged"},
	} {
		t.Run(row.name, func(t *testing.T) {
			table := New(100)
			if row.tat != 0 {
				table.Set(7, 1, row.tat)
			}
			table.Refund(7, now, row.amount)
			if got := table.Peek(7, now); got != row.want {
				t.Errorf("got %d, want %d: %s", got, row.want, row.why)
			}
		})
	}
}

func TestSet(t *testing.T) {
	table := New(100)
	table.Set(7, 10, 10)
	if n := table.Len(); n != 0 {
		t.Errorf("%d keys: one that owes nothing need not be known", n)
	}
	if before := table.Set(7, 10, 50); before != 0 {
		t.Errorf("got %d: the key was unknown", before)
	}
	if before := table.Set(7, 10, 30); before != 50 {
		t.Errorf("got %d: Set returns what was there", before)
	}
	if got := table.Peek(7, 10); got != 30 {
		t.Errorf("got %d: Set overwrites, down too", got)
	}
	table.Set(7, 10, 5)
	if got := table.Peek(7, 10); got != 5 {
		t.Errorf("got %d: a known key's debt is cleared", got)
	}
	if debtFree, indebted := table.Forgotten(); debtFree+indebted != 0 {
		t.Error("nothing was forgotten")
	}
}

func deleted(t *Table, key uint64) bool {
	_, known := t.Delete(key)
	return known
}

func TestDelete(t *testing.T) {
	table := New(100)
	table.Set(7, 1, 50)
	if !deleted(table, 7) || deleted(table, 7) {
		t.Error("Delete says whether the key was known")
	}
	if table.Len() != 0 || table.Peek(7, 1) != 0 {
		t.Error("the key is still there")
	}
	if debtFree, indebted := table.Forgotten(); debtFree+indebted != 0 {
		t.Error("what was deleted does not count as forgotten")
	}
}

func TestHashZero(t *testing.T) {
	table := New(100)
	table.Add(0, 1, 10, 10)
	if _, ok := table.Add(0, 1, 10, 10); ok {
		t.Error("hash 0 is a key like any other, and must not pass unlimited")
	}
	if table.Peek(1, 1) != 11 || table.Len() != 1 {
		t.Error("hash 0 counts as 1")
	}
	for key := range table.All() {
		if key != 1 {
			t.Errorf("All yields %d", key)
		}
	}
	if !deleted(table, 0) {
		t.Error("hash 0 cannot be deleted")
	}
}

func TestAll(t *testing.T) {
	table, want := New(20_000), model{}
	for i := range 10_000 {
		want[hashOf(i)] = int64(i + 2)
		table.Set(hashOf(i), 1, int64(i+2))
	}
	got := model{}
	for key, tat := range table.All() {
		got[key] = tat
		if len(got) == 1 {
			table.Delete(key) // would deadlock if a lock were held
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d keys, want %d", len(got), len(want))
	}
	for key, tat := range got {
		if want[key] != tat {
			t.Errorf("%#x: %d, want %d", key, tat, want[key])
		}
	}
	for range table.All() {
		break // must not panic
	}
}

// However many come at once, exactly the burst passes.
func TestBurstIsExact(t *testing.T) {
	const burst = 137
	table := New(100_000)
	var passed atomic.Int64
	var group sync.WaitGroup
	for range 1000 {
		group.Go(func() {
			if _, ok := table.Add(42, 1, second, burst*second); ok {
				passed.Add(1)
			}
		})
	}
	group.Wait()
	if passed.Load() != burst {
		t.Errorf("%d of 1000 passed, want %d", passed.Load(), burst)
	}
}

// A table holds nearly as many debts as it has slots before it forgets one.
func TestFewDebtsAreDisplacedEarly(t *testing.T) {
	for _, row := range []struct{ bound, debts int }{
		{100_000, 50_000},
		{100_000, 95_000},
		{1_000_000, 950_000},
		{1000, 900},
		{10_000, 9500},
	} {
		table := New(row.bound)
		for i := range row.debts {
			table.Set(hashOf(i), 1, 10)
		}
		_, indebted := table.Forgotten()
		if indebted >= uint64(row.debts/1000) && indebted > 0 {
			t.Errorf("%d of %d debts were forgotten in a table of %d", indebted, row.debts, row.bound)
		}
		if held := table.Len(); held != row.debts-int(indebted) {
			t.Errorf("%d keys are held, want %d without the %d forgotten", held, row.debts, indebted)
		}
	}
}

// Ten million fresh keys, each with a debt that outlasts the flood.
func TestFloodOfFreshKeys(t *testing.T) {
	const (
		bound = 100_000
		burst = 5
	)
	table, blocked := New(bound), hashOf(-1)
	now := int64(1)
	for range burst {
		table.Add(blocked, now, 60*second, burst*60*second)
	}
	var full int
	for i := range floodKeys {
		now += 1000
		if _, ok := table.Add(hashOf(i), now, 60*second, burst*60*second); !ok {
			t.Fatalf("fresh key %d was denied", i)
		}
		if i%1000 == 0 && table.Len() > bound {
			t.Fatalf("%d keys are held after %d", table.Len(), i)
		}
		if i == 5*bound {
			full = table.bytes()
		}
	}
	if n := table.Len(); n > bound || n < bound*99/100 {
		t.Errorf("%d keys are held, want nearly all of %d", n, bound)
	}
	if got := table.bytes(); got != full {
		t.Errorf("grew from %d to %d bytes after it was full", full, got)
	}
	if _, ok := table.Add(blocked, now, 60*second, burst*60*second); ok {
		t.Error("a blocked key got free in the flood")
	}
	_, indebted := table.Forgotten()
	if held := uint64(table.Len()); indebted != floodKeys+1-held {
		t.Errorf("%d debts were counted as forgotten, want %d", indebted, floodKeys+1-held)
	}
}

// A flood displaces only itself: whoever owes more than a fresh key keeps the
// debt, and whoever owes nothing passes.
func TestFloodLeavesOthersAlone(t *testing.T) {
	const (
		clients = 1000
		burst   = 5
	)
	table, before := New(10_000), model{}
	now := int64(1)
	for i := range clients {
		for range 2 + i%(burst-1) {
			table.Add(hashOf(i), now, second, burst*second)
		}
		before[hashOf(i)] = table.Peek(hashOf(i), now)
	}
	for i := range 500_000 {
		now += 1000
		if _, ok := table.Add(hashOf(clients+i), now, second, burst*second); !ok {
			t.Fatalf("fresh key %d was denied", i)
		}
	}
	for i := range clients {
		if got := table.Peek(hashOf(i), now); got != before[hashOf(i)] {
			t.Errorf("client %d: the TAT changed from %d to %d", i, before[hashOf(i)], got)
		}
	}
	if _, ok := table.Add(hashOf(-1), now, second, burst*second); !ok {
		t.Error("a client without debt was denied")
	}
}

// Once the debts of a flood have passed, their slots are free for others.
func TestDebtFreeIsForgottenFirst(t *testing.T) {
	table := New(1000)
	for i := range 5000 {
		table.Set(hashOf(i), 1, 100)
	}
	_, before := table.Forgotten()
	for i := range 900 {
		table.Set(hashOf(10_000+i), 100, 200)
	}
	if _, indebted := table.Forgotten(); indebted != before {
		t.Errorf("%d debts were displaced beside keys that owe nothing", indebted-before)
	}
	if debtFree, indebted := table.Forgotten(); table.Len()+int(debtFree+indebted) != 5900 {
		t.Errorf("of 5900 keys, %d are held, and %d and %d forgotten", table.Len(), debtFree, indebted)
	}
	for i := range 900 {
		if table.Peek(hashOf(10_000+i), 100) != 200 {
			t.Fatalf("debt %d is gone", i)
		}
	}
}

// A weakness: with a burst of one, a blocked key owes no more than a fresh one,
// so that the oldest goes first, and passes again too early.
func TestBurstOfOneForgetsTheOldest(t *testing.T) {
	table := New(ways)
	for i := range ways + 1 {
		if _, ok := table.Add(hashOf(i), int64(1+i), second, second); !ok {
			t.Fatalf("key %d was denied", i)
		}
	}
	for i := range ways + 1 {
		if known := table.Peek(hashOf(i), 1) != 0; known != (i > 0) {
			t.Errorf("key %d is known: %v", i, known)
		}
	}
	if _, ok := table.Add(hashOf(0), 20, second, second); !ok {
		t.Error("the forgotten key was denied")
	}
}

// inSets returns the i-th hash with these two sets in a shard of 4.
func inSets(first, second, i int) uint64 {
	return uint64(first)<<46 | uint64(second)<<30 | uint64(i+1)
}

func TestRelocation(t *testing.T) {
	table := New(4 * ways)
	for i := range 15 {
		table.Set(inSets(0, 1, i), 1, 100)
	}
	table.Set(inSets(0, 2, 15), 1, 100)
	table.Set(inSets(0, 1, 16), 1, 100)
	if _, indebted := table.Forgotten(); indebted != 0 || table.Len() != 17 {
		t.Fatal("a debt was displaced, though one could move to its other set")
	}
	if table.Peek(inSets(0, 2, 15), 1) != 100 || table.Peek(inSets(0, 1, 16), 1) != 100 {
		t.Error("the key that moved or the one it moved for was not found")
	}

	table.Set(inSets(0, 1, 3), 1, 99)
	table.Set(inSets(0, 1, 17), 1, 50)
	if _, indebted := table.Forgotten(); indebted != 1 || table.Peek(inSets(0, 1, 3), 1) != 0 {
		t.Error("where none can move, the smallest of the debts goes")
	}
	if table.Peek(inSets(0, 1, 17), 1) != 50 {
		t.Error("the newcomer is always stored, even with a smaller debt")
	}
}

// The bound is exact even where it ends within a set: the slots beyond it are
// neither used nor moved.
func TestBlockedSlots(t *testing.T) {
	table := New(3*ways + 1)
	for i := range 2*ways + 1 { // so many that the table grows to 4 sets
		table.Set(inSets(1, 3, i), 1, math.MaxInt64)
	}
	if _, indebted := table.Forgotten(); indebted != 8 || table.Len() != ways+1 {
		t.Errorf("%d were displaced and %d are held, want 8, and 9: set 3 has but one slot", indebted, table.Len())
	}
	for i := range 1000 {
		table.Set(hashOf(i), 1, math.MaxInt64)
	}
	if n := table.Len(); n != 3*ways+1 {
		t.Errorf("%d are held, want all of %d", n, 3*ways+1)
	}
}

// Growing loses nothing: all debts are there at every size on the way.
func TestGrowthKeepsDebts(t *testing.T) {
	table := New(50_000)
	bytes := table.bytes()
	for i := range 45_000 {
		table.Set(hashOf(i), 1, int64(i+2))
		if b := table.bytes(); b != bytes || i == 44_999 {
			bytes = b
			for j := 0; j <= i; j += 1 + i/1000 {
				if got := table.Peek(hashOf(j), 1); got != int64(j+2) {
					t.Fatalf("debt %d is %d after growth at %d", j, got, i)
				}
			}
		}
	}
	if debtFree, indebted := table.Forgotten(); debtFree+indebted != 0 {
		t.Errorf("%d and %d were forgotten", debtFree, indebted)
	}
}

// Keys without debt do not make a table grow: it keeps what a calm site needs.
func TestStaysSmall(t *testing.T) {
	table := New(1_000_000)
	start := table.bytes()
	for i := range 100_000 {
		table.Add(hashOf(i), int64(1+i*10), 1000, 1000)
	}
	if got := table.bytes(); got > 2*start {
		t.Errorf("grew from %d to %d bytes for 100 debts at a time", start, got)
	}
}

// Debts that move into a table keep what they can: none in a thousand is lost while
// there is room, and of too many nearly all of the largest are kept, in whatever order they
// come.
func TestMove(t *testing.T) {
	for _, row := range []struct{ from, to int }{
		{100_000, 60_000}, {100_000, 1000}, {1_000_000, 7}, {100_000, 1}, {1000, 999}, {10_000, 10_000}, {5, 8}, {1000, 200_000},
	} {
		t.Run(fmt.Sprintf("%d to %d", row.from, row.to), func(t *testing.T) {
			before, table := New(row.from), New(row.to)
			n := min(row.from*9/10, 90_000)
			for i := range n {
				before.Set(hashOf(i), 1, int64(i+2))
			}
			for key, tat := range before.All() {
				table.Move(key, 1, tat)
			}
			debtFree, indebted := table.Forgotten()
			if debtFree != 0 || table.Len()+int(indebted) != n || table.Len() > row.to {
				t.Errorf("%d keys before, %d after, %d counted, the bound is %d", n, table.Len(), indebted, row.to)
			}
			if n <= row.to*9/10 && int(indebted) > n/1000 {
				t.Errorf("%d debts were forgotten though there is room", indebted)
			}
			top := min(n, row.to*9/10)
			missing := 0
			for i := n - top; i < n; i++ {
				switch table.Peek(hashOf(i), 1) {
				case 0:
					missing++
				case int64(i + 2):
				default:
					t.Fatalf("debt %d is %d", i, table.Peek(hashOf(i), 1))
				}
			}
			if missing > top/20 {
				t.Errorf("%d of the %d largest debts are gone", missing, top)
			}
		})
	}
}

func TestMoveOfWhatIsThere(t *testing.T) {
	table := New(100)
	for _, row := range []struct{ tat, want int64 }{{1, 0}, {50, 50}, {40, 50}, {60, 60}} {
		table.Move(7, 1, row.tat)
		if got := table.Peek(7, 1); got != row.want {
			t.Errorf("after %d: %d, want %d", row.tat, got, row.want)
		}
	}
}

func TestShards(t *testing.T) {
	for _, row := range []struct{ keys, shards int }{{1_000_000, 489}, {2_000_000, 977}, {100, 1}, {2048, 1}, {10_000, 5}} {
		if n := len(New(row.keys).shards); n != row.shards {
			t.Errorf("%d shards for %d keys, want %d", n, row.keys, row.shards)
		}
	}
}

// Everything at once: a burst stays exact while the table is read.
func TestConcurrentUse(t *testing.T) {
	const (
		keys  = 100
		extra = 10 // come and go
		burst = 50
	)
	table := New(20_000)
	var passed [keys]atomic.Int64
	var callers, others sync.WaitGroup
	var done atomic.Bool
	for g := range 8 {
		callers.Go(func() {
			for i := 0; i < 10_000; i++ {
				key := (i + g) % keys
				if _, ok := table.Add(hashOf(key), 1, second, burst*second); ok {
					passed[key].Add(1)
				}
			}
		})
	}
	meanwhile := func(f func(i int)) {
		others.Go(func() {
			for i := 0; !done.Load(); i++ {
				f(i)
				runtime.Gosched()
			}
		})
	}
	meanwhile(func(int) {
		for range table.All() {
		}
		if n := table.Len(); n > keys+extra {
			t.Errorf("%d keys, only %d are used", n, keys+extra)
		}
		table.Forgotten()
	})
	meanwhile(func(i int) {
		key := hashOf(keys + i%extra)
		table.Set(key, 1, 2)
		table.Refund(key, 1, 1)
		table.Delete(key)
		table.Move(key, 1, 2)
		table.Delete(key)
	})
	callers.Wait()
	done.Store(true)
	others.Wait()
	for key := range passed {
		if got := passed[key].Load(); got != burst {
			t.Errorf("key %d passed %d times, want %d", key, got, burst)
		}
	}
}

func TestLayout(t *testing.T) {
	if size := unsafe.Sizeof(entry{}); size != 16 {
		t.Errorf("an entry has %d bytes", size)
	}
	if size := unsafe.Sizeof(shard{}); size != 128 {
		t.Errorf("a shard has %d bytes: two mutexes may share a cache line", size)
	}
}

func TestBytesPerKey(t *testing.T) {
	for _, bound := range []int{1000, 1001, 4096, 4097, 5000, 10_000, 99_999, 100_000, 1_000_000} {
		table := New(bound)
		for i := range 3 * bound / 2 {
			table.Set(hashOf(i), 1, 10)
		}
		if perKey := float64(table.bytes()) / float64(bound); perKey > 20 {
			t.Errorf("%.2f bytes for each of %d keys", perKey, bound)
		}
	}
}

// The same as the heap sees it: with what the allocator rounds up.
func TestHeapPerKey(t *testing.T) {
	heap := func() int64 {
		var stats runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&stats)
		return int64(stats.HeapAlloc)
	}
	const bound = 1_000_000
	before := heap()
	table := New(bound)
	for i := range 3 * bound / 2 {
		table.Set(hashOf(i), 1, 10)
	}
	if perKey := float64(heap()-before) / bound; perKey > 20 {
		t.Errorf("%.2f bytes a key", perKey)
	}
	runtime.KeepAlive(table)
}

func TestNoAllocations(t *testing.T) {
	table := New(10_000)
	for i := range 50_000 {
		table.Add(hashOf(i), 1, second, 5*second)
	}
	i := 100_000
	for name, f := range map[string]func(){
		"Add, known":    func() { table.Add(hashOf(49_999), 1, second, 5*second) },
		"Add, fresh":    func() { i++; table.Add(hashOf(i), 1, second, 5*second) },
		"Add, denied":   func() { table.Add(hashOf(49_999), 1, second, 0) },
		"Peek, known":   func() { table.Peek(hashOf(49_999), 1) },
		"Peek, fresh":   func() { i++; table.Peek(hashOf(i), 1) },
		"Refund, known": func() { table.Refund(hashOf(49_999), 1, 1) },
		"Refund, fresh": func() { i++; table.Refund(hashOf(i), 1, 1) },
		"Set, fresh":    func() { i++; table.Set(hashOf(i), 1, second) },
	} {
		if allocations := testing.AllocsPerRun(1000, f); allocations != 0 {
			t.Errorf("%s: %v allocations", name, allocations)
		}
	}
}

// The two choices of a key are independent of each other and of its shard.
func TestChoicesAreSpread(t *testing.T) {
	const sets = 16
	s := &shard{sets: make([]set, sets)}
	index := map[*set]int{}
	for i := range s.sets {
		index[&s.sets[i]] = i
	}
	var pairs [sets][sets]int
	for i, n := 0, 0; n < 100*sets*sets; i++ {
		if key := hashOf(i); reduce(key, 8) == 3 {
			first, second := s.candidates(key)
			pairs[index[first]][index[second]]++
			n++
		}
	}
	for i := range pairs {
		for j, n := range pairs[i] {
			if n < 50 || n > 160 {
				t.Errorf("sets %d and %d were chosen %d times, want about 100", i, j, n)
			}
		}
	}
}

// bytes is what the table takes at present.
func (t *Table) bytes() int {
	shards := t.shards
	n := int(unsafe.Sizeof(*t)) + cap(shards)*int(unsafe.Sizeof(shard{}))
	for s := range t.locked() {
		n += cap(s.sets) * int(unsafe.Sizeof(set{}))
	}
	return n
}
