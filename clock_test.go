package edgelimit

import (
	"go/ast"
	"slices"
	"strings"
	"testing"
)

// Budgets are counted in monotonic time: the wall clock may jump by an hour
// either way, and nothing changes.
func TestClockIsMonotonic(t *testing.T) {
	if !strings.Contains(processStart.String(), " m=") {
		t.Errorf("the start of the process is wall time alone: %s", processStart)
	}
	if now := clock(); now < 1 || now > clock() {
		t.Errorf("the clock reads %d", now)
	}
}

// wallTime are the functions that may ask what time it is, each with its reason.
// All others count by clock.
var wallTime = map[string]string{
	"app.go processStart": "its monotonic reading is what clock counts from",
	"app.go clock":        "since processStart, by its monotonic reading",
	"persist.go load":     "a snapshot must outlive the process, and with it the monotonic clock",
	"persist.go write":    "the same",
	"respond.go deny":     "a deadline of a connection, which decides nothing",

	"fleet.go newFleet": "since when the store is in its state, for people to read",
	"fleet.go setState": "the same",

	"redisstore/conn.go newConn":  "its monotonic reading is what the connection's clock counts from",
	"redisstore/conn.go clock":    "since newConn, by its monotonic reading",
	"redisstore/conn.go deadline": "what is left of a context's deadline, by its monotonic reading",
}

func TestWallTimeIsReadByFewOnly(t *testing.T) {
	var found []string
	for _, file := range parseSource(t) {
		if strings.HasPrefix(file.path, "probe_") || strings.HasPrefix(file.path, "xcaddy/") {
			continue // the command that asks from outside: it decides nothing
		}
		for _, declaration := range file.syntax.Decls {
			name := "processStart"
			if f, ok := declaration.(*ast.FuncDecl); ok {
				name = f.Name.Name
			}
			ast.Inspect(declaration, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				f, ok := call.Fun.(*ast.SelectorExpr)
				if !ok || !slices.Contains([]string{"Now", "Since", "Until"}, f.Sel.Name) {
					return true
				}
				if from, ok := f.X.(*ast.Ident); ok && from.Name == "time" {
					found = append(found, file.path+" "+name)
				}
				return true
			})
		}
	}
	for _, place := range found {
		if wallTime[place] == "" {
			t.Errorf("%s reads the time by itself: count by clock, which no jump of the wall clock moves", place)
		}
	}
}
