package table

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// model is the slow, obvious table: a map that never forgets.
type model map[uint64]int64

func (m model) add(key uint64, now, increment, tolerance int64) (int64, bool) {
	tat := max(m[key], now) + increment
	if tat-now > tolerance {
		return m[key], false
	}
	m[key] = tat
	return tat, true
}

func (m model) refund(key uint64, now, amount int64) {
	if debt := m[key] - now; debt > 0 {
		m[key] -= min(amount, debt)
	}
}

// debt is what a TAT means: how far it lies in the future.
func debt(tat, now int64) int64 { return max(tat-now, 0) }

// pair drives a table and the model with the same operations.
type pair struct {
	*testing.T
	table *Table
	model model
	keys  []uint64
	now   int64
	lost  uint64 // debts seen to be lower than the model's
}

// do runs one operation on both, and compares what it answers.
func (p *pair) do(op int, key uint64, a, b int64) string {
	switch op {
	case 0, 1, 2, 3:
		did := fmt.Sprintf("Add(%#x, %d, %d, %d)", key, p.now, a, b)
		tat, ok := p.table.Add(key, p.now, a, b)
		want, wantOK := p.model.add(key, p.now, a, b)
		if ok != wantOK || debt(tat, p.now) != debt(want, p.now) {
			p.Fatalf("%s = %d, %v; the model says %d, %v", did, tat, ok, want, wantOK)
		}
		return did
	case 4:
		did := fmt.Sprintf("Set(%#x, %d, %d)", key, p.now, p.now+a-b)
		if before, want := p.table.Set(key, p.now, p.now+a-b), p.model[key]; debt(before, p.now) != debt(want, p.now) {
			p.Fatalf("%s = %d; the model says %d", did, before, want)
		}
		p.model[key] = p.now + a - b
		return did
	case 5:
		p.table.Refund(key, p.now, a)
		p.model.refund(key, p.now, a)
		return fmt.Sprintf("Refund(%#x, %d, %d)", key, p.now, a)
	case 6:
		did := fmt.Sprintf("Delete(%#x)", key)
		if tat, known := p.table.Delete(key); known && debt(tat, p.now) != debt(p.model[key], p.now) {
			p.Fatalf("%s = %d; the model says %d", did, tat, p.model[key])
		}
		delete(p.model, key)
		return did
	case 7:
		p.now += a
		return fmt.Sprintf("now = %d", p.now)
	default:
		p.table.Move(key, p.now, p.now+a-b)
		p.model[key] = max(p.model[key], p.now+a-b)
		return fmt.Sprintf("Move(%#x, %d, %d)", key, p.now, p.now+a-b)
	}
}

// check compares all keys. A debt may be lower than the model's only because it
// was displaced, which makes it 0, and then it was counted.
func (p *pair) check(did string) {
	p.Helper()
	if n, bound := p.table.Len(), p.table.MaxKeys(); n > bound {
		p.Fatalf("after %s: %d keys, above the bound of %d", did, n, bound)
	}
	for _, key := range p.keys {
		got, want := debt(p.table.Peek(key, p.now), p.now), debt(p.model[key], p.now)
		if got == want {
			continue
		}
		if got != 0 {
			p.Fatalf("after %s: key %#x owes %d, the model says %d", did, key, got, want)
		}
		p.lost++
		delete(p.model, key)
	}
	if _, indebted := p.table.Forgotten(); indebted != p.lost {
		p.Fatalf("after %s: %d debts were lost, %d were counted", did, p.lost, indebted)
	}
	n := 0
	for key, tat := range p.table.All() {
		n++
		if debt(tat, p.now) != debt(p.model[key], p.now) {
			p.Fatalf("after %s: All says %#x: %d, the model %d", did, key, tat, p.model[key])
		}
	}
	if n != p.table.Len() {
		p.Fatalf("after %s: All yields %d keys, Len says %d", did, n, p.table.Len())
	}
}

// Far below the bound, the table is a map.
func TestSameAsMap(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	p := &pair{T: t, table: New(20_000), model: model{}, now: 1}
	for range 3000 {
		p.keys = append(p.keys, random.Uint64())
	}
	for i := range 200_000 {
		op := random.IntN(9)
		key := p.keys[random.IntN(len(p.keys))]
		did := p.do(op, key, random.Int64N(1000), random.Int64N(5000))
		if i%5000 == 0 {
			p.check(did)
		}
	}
	p.check("all")
	if p.lost != 0 {
		t.Errorf("%d debts were displaced while there was room", p.lost)
	}
}

// Around the bound, a table forgets, but only what it may, and it counts that.
func FuzzTable(f *testing.F) {
	const keys, maxBound = 64, 50
	f.Add(uint8(1), []byte{0, 1, 9, 0, 2, 9, 0, 3, 9})
	f.Add(uint8(8), []byte("every byte is an operation, a key, and its numbers"))
	f.Add(uint8(20), []byte{0, 1, 200, 4, 2, 255, 7, 0, 50, 9, 0, 3, 8, 0, 0, 9, 0, 40})
	random := rand.New(rand.NewPCG(1, 2))
	for _, bound := range []uint8{3, 9, 24, 40, 49} {
		ops := make([]byte, 600)
		for i := range ops {
			ops[i] = byte(random.Uint32())
		}
		f.Add(bound, ops)
	}
	f.Fuzz(func(t *testing.T, bound uint8, ops []byte) {
		p := &pair{T: t, table: New(int(bound % maxBound)), model: model{}, now: 1}
		for i := range keys {
			p.keys = append(p.keys, hashOf(i))
		}
		p.keys[0] = 1          // as which the hash 0 counts
		p.keys[1] = 1<<32 - 1  // hashes that are all alike
		p.keys[2] = 1<<32 - 2  // in their upper bits
		p.keys[3] = ^uint64(0) // and one at the end
		for len(ops) >= 3 {
			key := p.keys[ops[1]%keys]
			number := int64(ops[2])
			p.check(p.do(int(ops[0]%9), key, number%40, number%maxBound))
			ops = ops[3:]
		}
	})
}
