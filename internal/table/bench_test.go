package table

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"
)

const (
	benchIncrement = int64(time.Second)
	benchTolerance = int64(time.Hour)
)

// benchTable returns a table of a million in which n keys owe something.
func benchTable(n int) *Table {
	t := New(1_000_000)
	for i := range n {
		t.Add(hashOf(i), 1, benchIncrement, benchTolerance)
	}
	return t
}

func benchmarkKeys(b *testing.B, n int) {
	t := benchTable(n)
	keys := make([]uint64, n)
	for i := range keys {
		keys[i] = hashOf(i)
	}
	b.ReportAllocs()
	i, now := 0, int64(1)
	for b.Loop() {
		t.Add(keys[i], now, benchIncrement, benchTolerance)
		now += 100
		if i++; i == n {
			i = 0
		}
	}
}

func BenchmarkAddHotKey(b *testing.B)      { benchmarkKeys(b, 1) }
func BenchmarkAdd10kKeys(b *testing.B)     { benchmarkKeys(b, 10_000) }
func BenchmarkAddMillionKeys(b *testing.B) { benchmarkKeys(b, 900_000) }

func BenchmarkAddDenied(b *testing.B) {
	t := New(1_000_000)
	t.Set(1, 1, 2)
	b.ReportAllocs()
	for b.Loop() {
		t.Add(1, 1, benchIncrement, benchIncrement)
	}
}

func BenchmarkPeekHotKey(b *testing.B) {
	t := benchTable(1)
	key := hashOf(0)
	for b.Loop() {
		t.Peek(key, 1)
	}
}

// A fresh key each time: into slots whose debts have passed, and into a table
// in which every slot has a debt that lasts.
func BenchmarkAddFreshKey(b *testing.B) {
	for _, row := range []struct {
		name string
		step int64
	}{{"debtFree", 10 * benchIncrement}, {"indebted", 1}} {
		b.Run(row.name, func(b *testing.B) {
			t := benchTable(2_000_000)
			i, now := 2_000_000, int64(1)
			b.ReportAllocs()
			for b.Loop() {
				t.Add(hashOf(i), now, benchIncrement, benchTolerance)
				i++
				now += row.step
			}
		})
	}
}

func BenchmarkAddParallel(b *testing.B) {
	for _, row := range []struct {
		name string
		keys int
	}{{"hotKey", 1}, {"900k", 900_000}} {
		b.Run(row.name, func(b *testing.B) {
			t := benchTable(row.keys)
			b.ReportAllocs()
			var goroutines atomic.Int64
			b.ResetTimer() // without b.Loop, what came before counts
			b.RunParallel(func(pb *testing.PB) {
				i := int(goroutines.Add(1)) * 7919
				for pb.Next() {
					i++
					t.Add(hashOf(i%row.keys), 1, benchIncrement, benchTolerance)
				}
			})
		})
	}
}

// All debts move into a larger table, and into a smaller one.
func BenchmarkMove(b *testing.B) {
	for _, maxKeys := range []int{10_000_000, 1_000_000, 100_000} {
		b.Run(fmt.Sprintf("to=%d", maxKeys), func(b *testing.B) {
			t := benchTable(900_000)
			for b.Loop() {
				other := New(maxKeys)
				for key, tat := range t.All() {
					other.Move(key, 1, tat)
				}
			}
		})
	}
}

// hashOf gives the i-th key a well-mixed hash (SplitMix64).
func hashOf(i int) uint64 {
	z := uint64(i+1) * 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
