// Command xcaddy is a Caddy with edge_limit. It is what `xcaddy build` makes, as
// a main package of this module, so that `go run` needs no other tool.
package main

import (
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/edgelimit/caddy-edgelimit"
	_ "github.com/edgelimit/caddy-edgelimit/redisstore"
)

func main() { caddycmd.Main() }
